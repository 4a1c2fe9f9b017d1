"""The figures of load ramps and other loads, one per worker and load."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
from matplotlib.figure import Figure

from specdec.figure_style import Provenance
from specdec.load_ramp import MeasuredRamp, RampFacts
from specdec.load_shapes import title
from specdec.plots import accept_length_around_switches, mode_timeline
from specdec.step_trace import around_switches

IDLE_S = 0.25  # shorter pauses do not show


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
