"""The figures of load ramps and other loads, one per worker and load: each can stand alone on a slide."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from specdec.analysis.stats import mean_interval
from specdec.figures.style import BLACK, BLUE, GREY, RC, VERMILLION, Provenance, finish
from specdec.load.shapes import title
from specdec.runs.load_ramp import MeasuredRamp, RampFacts
from specdec.runs.step_trace import around_switches

# Light shades of the colours of static EAGLE-3 and dynamic, the second one darker for a print in grey.
MODE_COLOUR = {"speculative": "#FDE8DA", "plain": "#B3D1E8"}
RATE_WINDOW_S = 1.0
IDLE_S = 0.25  # shorter pauses do not show
_SIDES = {"before off": "Before switching off", "after on": "After coming back"}


def timelines(ramps: Iterable[MeasuredRamp]) -> dict[str, Figure]:
    """Batch size, mode and tok/s over time, by `RampFacts.name`."""
    return {
        ramp.facts.name: mode_timeline(
            with_idle(ramp.trace, ramp.requests),
            ramp.facts.threshold,
            ramp.facts.worker,
            _about(ramp.facts),
            title(ramp.facts.load),
        )
        for ramp in ramps
    }


def recoveries(ramps: Iterable[MeasuredRamp]) -> dict[str, Figure]:
    """Accept length around switches, by `RampFacts.name`; none of a load that did not switch off and on."""
    tables = {ramp.facts.name: (around_switches(ramp.trace), ramp.facts) for ramp in ramps}
    return {
        name: accept_length_around_switches(around, facts.worker, _about(facts))
        for name, (around, facts) in tables.items()
        if around["side"].nunique() == 2
    }


def mode_timeline(
    trace: pd.DataFrame, threshold: int | None, worker: str, about: Provenance, load: str = "A load ramp"
) -> Figure:
    """Batch size, mode and output tok/s while load goes up and down on one server.

    `trace`: one row per decode step (`step_trace.read_trace`), in order; rows of mode "idle" stand where none
    ran (`with_idle`). `load`: how the title names it.
    """
    with mpl.rc_context(RC):
        figure = Figure(figsize=(10, 5.6), dpi=150, layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True)
    t_s = (trace["t_s"] - trace["t_s"].iloc[0]).to_numpy(dtype=float)
    for ax in (top, bottom):
        _shade(ax, t_s, trace["mode"].tolist())
    batch = trace["batch_size"]
    top.step(t_s, batch, where="post", color=BLACK, linewidth=1.4, label="batch size", zorder=3)
    if threshold is not None:
        top.axhline(threshold, color=VERMILLION, linestyle="--", linewidth=1.4, label=f"threshold {threshold}")
    top.set_ylabel("batch size\n(requests in a step)")
    bottom.plot(*_rate(t_s, trace["tokens"].to_numpy(dtype=float)), color=BLUE, linewidth=1.8, label="output tok/s")
    bottom.set_ylabel(f"output tokens per second\n(windows of {RATE_WINDOW_S:g} s)")
    bottom.set_xlabel("seconds since the first decode step")
    for ax in (top, bottom):
        ax.set_ylim(bottom=0)
        ax.set_xlim(0, t_s[-1])
    shades = {f"{mode} steps": Patch(facecolor=shade) for mode, shade in MODE_COLOUR.items()}
    lines = {str(line.get_label()): line for ax in (top, bottom) for line in ax.lines}
    modes = trace.loc[trace["mode"] != "idle", "mode"]
    switches = int((modes != modes.shift()).sum()) - 1
    note = f"{len(modes)} decode steps, {switches} switches"
    finish(figure, f"{load} on one server, worker {worker}", about, note, legend={**shades, **lines})
    return figure


def accept_length_around_switches(around: pd.DataFrame, worker: str, about: Provenance) -> Figure:
    """Accept length of the last speculative steps before switching off and of the first after coming back.

    `around`: a table of `step_trace.around_switches`.
    """
    with mpl.rc_context(RC):
        figure = Figure(figsize=(10, 4.8), dpi=150, layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
    before = float(around.loc[around["side"] == "before off", "accept_length"].mean())
    for ax, (side, when) in zip(panels, _SIDES.items(), strict=True):
        rows = around[around["side"] == side]
        ax.plot(
            rows["step"],
            rows["accept_length"],
            ".",
            color=GREY,
            alpha=0.4,
            markersize=5,
            label="single steps",
        )
        means = rows.groupby("step")["accept_length"].mean()
        switches = rows["switch"].nunique()
        whole = mean_interval(rows["accept_length"].to_numpy(dtype=float))
        ax.plot(
            means.index,
            means,
            color=VERMILLION,
            marker="s",
            markersize=4,
            linewidth=1.6,
            label="mean over the switches",
        )
        ax.axhline(before, color=BLACK, linestyle="--", linewidth=1.2, label="mean before switching off")
        ax.set_title(
            f"{when}: {whole.estimate:.2f} ± {whole.high - whole.estimate:.2f} ({switches} switches)",
            loc="left",
        )
        ax.set_xlabel("speculative steps from the switch")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylabel("accept length\n(tokens per step and request)")
    panels[0].set_ylim(bottom=0.9)
    note = "±: 95 % interval of the mean, steps taken as independent; steps that commit nothing left out"
    finish(figure, f"Accept length around switches, worker {worker}", about, note)
    return figure


def with_idle(trace: pd.DataFrame, requests: pd.DataFrame) -> pd.DataFrame:
    """The trace with a row of batch size 0 and mode "idle" where the server stood without a request, from its end on.

    Between two steps there can also be a prefill; the requests (in the client's time) tell which it was. The
    two clocks are set by the last token, which the client had when the last step that committed one ended.
    """
    end_s = trace["t_s"] + trace["duration_us"] / 1e6
    next_s = trace["t_s"].shift(-1)
    client_zero_s = end_s[trace["tokens"] > 0].max() - requests["last_token_s"].max()
    middle_s = (end_s + next_s) / 2 - client_zero_s
    in_flight = [((requests["start_s"] <= t_s) & (t_s < requests["end_s"])).any() for t_s in middle_s]
    idle = (next_s - end_s > IDLE_S) & ~pd.Series(in_flight, index=trace.index)
    gaps = pd.DataFrame({"t_s": end_s[idle], "batch_size": 0, "mode": "idle", "tokens": 0})
    return pd.concat([trace, gaps]).sort_values("t_s", kind="stable", ignore_index=True)


def _about(facts: RampFacts) -> Provenance:
    runs = "n = 1 ramp" if facts.load == "ramp" else f"n = 1 run of {facts.load}"
    if (sent := facts.open_loop) is not None:
        runs += f": {facts.requests} requests ({facts.failed_requests} failed)"
        runs += f", sent at most {sent.send_lag_ms_max:.0f} ms late"
    return Provenance(runs, facts.model, facts.profile, facts.sglang, facts.machine)


def _shade(ax: Axes, t_s: npt.NDArray[np.float64], modes: Sequence[str]) -> None:
    """Colour the background by mode, from each switch to the next; nothing where the server was idle."""
    starts = [0, *(i for i in range(1, len(modes)) if modes[i] != modes[i - 1]), len(modes) - 1]
    for begin, end in itertools.pairwise(starts):
        if modes[begin] != "idle":
            ax.axvspan(t_s[begin], t_s[end], color=MODE_COLOUR[modes[begin]], linewidth=0)


def _rate(t_s: npt.NDArray[np.float64], tokens: npt.NDArray[np.float64]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Tokens per second in whole windows; their middles in s."""
    windows = max(1, int(t_s[-1] / RATE_WINDOW_S))
    window = (t_s / RATE_WINDOW_S + 1e-9).astype(int)
    sums = np.bincount(window, weights=tokens)[:windows]
    return (np.arange(len(sums)) + 0.5) * RATE_WINDOW_S, sums / RATE_WINDOW_S
