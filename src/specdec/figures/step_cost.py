"""The figure of the step costs: where a decode step's time goes, and what a token costs a request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.figures.style import BLACK, BLUE, GREY, ORANGE, SKY, VERMILLION, Provenance, finish, worker_panels
from specdec.runs.plan import ARM_NONE
from specdec.runs.step_cost import Mode, StepCost, WorkerStepCosts, ms_per_token

# Colour and hatch: hatched parts differ in a grey print too.
_PARTS = {
    "draft": (ORANGE, "///"),
    "verify": (BLUE, ""),
    "draft_extend": (SKY, "..."),
    "forward": ("#444444", ""),
    "rest": ("#D0D0D0", ""),
}
_LABELS = {
    "draft_extend": "draft extend",
    "forward": "baseline's forward",
    "rest": "rest (sampling, scheduling)",
}
_MODES: dict[Mode, tuple[str, str]] = {
    "speculative": ("spec.", VERMILLION),
    "plain": ("plain", GREY),
    "baseline": ("base", BLACK),
}
Array = npt.NDArray[np.float64]
_TITLE = "What a decode step costs"
_WIDTH = 0.27  # of a bar; a batch size takes 1


def step_cost_figure(costs: Sequence[WorkerStepCosts]) -> Figure:
    """Median step by batch size, split into its parts, a panel per worker; below, ms per token and request.

    The baseline's step stands beside those of every worker. Where no worker was measured the figure says so.
    """
    workers = {one.worker: one for one in costs if one.worker != ARM_NONE and one.costs}
    if not workers:
        return _nothing()
    baseline = [cost for one in costs if one.worker == ARM_NONE for cost in one.costs]
    titles = pd.DataFrame([one.model_dump(exclude={"costs"}) | {"arm": "static"} for one in workers.values()])
    figure, (top, bottom) = worker_panels(titles, rows=2, height=6.8)
    for name, one in workers.items():
        found = [*one.costs, *baseline]
        _draw_steps(top[name], found)
        _draw_tokens(bottom[name], found)
    for panels, text in ((top, "ms per decode step\n(median)"), (bottom, "ms per token\nand request")):
        first = next(iter(panels.values()))
        first.set_ylabel(text)
        first.set_ylim(0, 1.15 * first.get_ylim()[1])  # room for the numbers above the bars
    for ax in bottom.values():
        ax.set_xlabel("batch size (requests in the decode step)")
    finish(figure, _TITLE, _about(costs), _note(costs), _legend(top))
    return figure


def _nothing() -> Figure:
    figure = Figure(figsize=(10, 0.8), dpi=150)
    figure.suptitle(_TITLE, x=0.012, ha="left", fontweight="bold", fontsize=14)
    figure.supxlabel("Not measured in this run: notebook 03 measures it.", x=0.012, ha="left", fontsize=10)
    return figure


def _draw_steps(ax: Axes, costs: Sequence[StepCost]) -> None:
    """Stacked bars; `rest` fills up to the median of the whole step, since medians do not add up."""
    at = _places(costs)
    totals = np.array([cost.total.p50_ms for cost in costs])
    done = np.zeros(len(costs))
    for part, (colour, hatch) in _PARTS.items():
        spreads = [getattr(cost, part) for cost in costs]
        height = np.array([0.0 if spread is None else spread.p50_ms for spread in spreads])
        if part == "rest":
            height = np.maximum(totals - done, 0.0)
        label = _LABELS.get(part, part)
        ax.bar(at, height, _WIDTH, done, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5, label=label)
        done += height
    quartiles = np.array([[cost.total.p25_ms, cost.total.p75_ms] for cost in costs])
    bars = np.abs(quartiles.T - totals)
    ax.errorbar(at, totals, bars, fmt="none", ecolor=BLACK, elinewidth=0.9, capsize=1.5)
    _write_values(ax, at, totals, above=quartiles[:, 1])
    _ticks(ax, costs)


def _draw_tokens(ax: Axes, costs: Sequence[StepCost]) -> None:
    at, values = _places(costs), np.array([ms_per_token(cost) for cost in costs])
    colours = [_MODES[cost.mode][1] for cost in costs]
    ax.bar(at, values, _WIDTH, color=colours, edgecolor="white", linewidth=0.5, label="ms per token and request")
    divided = [f"÷ {cost.accept_length:.2f}\n= " if cost.mode == "speculative" else "" for cost in costs]
    _write_values(ax, at, values, above=values, before=divided)
    _ticks(ax, costs)


def _places(costs: Sequence[StepCost]) -> Array:
    """Where the bars stand: a batch size a unit, its modes side by side."""
    batches = sorted({cost.batch_size for cost in costs})
    return np.array([batches.index(c.batch_size) + (list(_MODES).index(c.mode) - 1) * 1.1 * _WIDTH for c in costs])


def _write_values(ax: Axes, at: Array, values: Array, above: Array, before: Sequence[str] | None = None) -> None:
    """Each bar's value above it; `before`: what stands in front of it."""
    for x, value, y, words in zip(at, values, above, before or [""] * len(at), strict=True):
        text = words + (f"{value:.1f}" if value < 100 else f"{value:.0f}")
        ax.annotate(text, (x, y), xytext=(0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=7.5)


def _ticks(ax: Axes, costs: Sequence[StepCost]) -> None:
    """Each bar's mode, and below the middle one the batch size."""
    ax.grid(False, axis="x")
    names = [_MODES[c.mode][0] + (f"\n{c.batch_size}" if c.mode == "plain" else "") for c in costs]
    ax.set_xticks(_places(costs), names, fontsize=8)
    ax.tick_params(axis="x", length=0)


def _legend(panels: dict[str, Axes]) -> dict[str, Artist]:
    handles, texts = next(iter(panels.values())).get_legend_handles_labels()
    return dict(zip(texts, handles, strict=True))


def _about(costs: Sequence[WorkerStepCosts]) -> Provenance:
    steps = [cost.steps for one in costs for cost in one.costs]

    def named(name: str) -> str:
        return " and ".join(sorted({str(getattr(one, name)) for one in costs}))

    repeats = f"n = {min(steps)} to {max(steps)} steps a bar"
    return Provenance(repeats, named("model"), named("profile"), named("sglang"), named("machine"))


def _note(costs: Sequence[WorkerStepCosts]) -> str:
    parts = [
        "bars: medians, from the start of a step to that of the next; thin lines: quartiles",
        "below: step ÷ accept length",
        "spec., plain: steps of one server with speculation on and off; base: a server without speculation",
    ]
    if any(one.device == "cuda" for one in costs):
        parts.append("host times: a stage's is that of its launch, the GPU's work is waited for in the rest")
    return "; ".join(parts)
