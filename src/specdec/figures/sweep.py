"""The figures of a sweep: each takes its rows and returns a matplotlib Figure that can stand alone on a slide.

Bars are 95 % intervals over the repeats; with fewer than three repeats there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from specdec.analysis.stats import (
    LEAST_STEPS,
    arm_name,
    arm_sort_key,
    cell_statistics,
    envelope,
    envelope_distance,
    measured,
    ratio_statistics,
    steady_accept_length,
)
from specdec.figures.style import (
    GREY,
    LEAST_REPEATS,
    ORANGE,
    Provenance,
    arm_place,
    concurrency_axis,
    draw_arms,
    finish,
    interval_note,
    label,
    style,
    worker_panels,
)

BARS = "bars: 95 % interval"
SIDE_BY_SIDE = "arms of one concurrency side by side"
_WIDE_CELLS = 6  # of a map's row
_RATIO_TICKS = (0.125, 0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 2.8, 4.0, 8.0)


def throughput(results: pd.DataFrame) -> Figure:
    """Output tok/s against concurrency per arm, one panel per worker; dots are the single repeats."""
    figure, (panels,) = worker_panels(results)
    statistics, cells = cell_statistics(results), measured(results, "output_tok_s")
    for worker, ax in panels.items():
        own = _of(cells, worker)
        names = sorted(set(own["arm_name"]), key=arm_sort_key)
        for position, name in enumerate(names):
            rows = own[own["arm_name"] == name]
            ax.plot(
                rows["concurrency"].astype(float),
                rows["output_tok_s"],
                ".",
                color=style(name, names).colour,
                alpha=0.35,
                markersize=5,
                transform=arm_place(ax, position, len(names)),
            )
            ax.update_datalim(rows[["concurrency", "output_tok_s"]].to_numpy(dtype=float))
        draw_arms(ax, _of(statistics, worker))
    first = next(iter(panels.values()))
    first.set_ylabel("output tokens per second")
    first.set_ylim(bottom=0)  # of all panels, which must have been drawn
    concurrency_axis(panels.values(), _concurrencies(results))
    note = "; ".join(["lines: means", *interval_note(statistics, BARS), "dots: single repeats", SIDE_BY_SIDE])
    finish(figure, "Throughput against concurrency", Provenance.of(results), note)
    return figure


def envelope_distance_figure(results: pd.DataFrame) -> Figure:
    """The better of baseline and static at each concurrency, and how far the dynamic arms are from it."""
    figure, (top, bottom) = worker_panels(results, rows=2, height=6.4)
    edges, statistics, distance = envelope(results), cell_statistics(results), envelope_distance(results)
    for worker, ax in top.items():
        edge = edges[edges["worker"] == worker]
        ax.plot(
            edge["concurrency"].astype(float),
            edge["envelope_tok_s"],
            color=ORANGE,
            linewidth=9,
            solid_capstyle="butt",
            alpha=0.4,
            label="envelope",
        )
        draw_arms(ax, _of(statistics, worker))
    for worker, ax in bottom.items():
        ax.axhline(1.0, color=ORANGE, linewidth=5, alpha=0.4)
        draw_arms(ax, distance[distance["worker"] == worker])
    first = next(iter(top.values()))
    first.set_ylabel("output tokens per second")
    first.set_ylim(bottom=0)
    next(iter(bottom.values())).set_ylabel("throughput /\nenvelope")
    concurrency_axis([*top.values(), *bottom.values()], _concurrencies(results))
    for ax in top.values():
        ax.set_xlabel("")
    bars = interval_note(statistics, BARS)
    note = "; ".join(
        ["envelope: the better of baseline and static", *bars, "below: ratio paired by block", SIDE_BY_SIDE]
    )
    finish(figure, "Dynamic speculation against the envelope", Provenance.of(results), note)
    return figure


def gain_map(results: pd.DataFrame) -> Figure:
    """Throughput over the baseline per arm and concurrency, coloured around 1.0, with its 95 % interval."""
    figure, (panels,) = worker_panels(results)
    statistics = ratio_statistics(results)
    concurrencies = _concurrencies(results)
    planned = {worker: _planned_arms(results, worker) for worker in panels}
    names = sorted(set().union(*planned.values()), key=arm_sort_key)
    # Noise stays pale, and the strongest cell keeps its number readable.
    reach = max([np.log2(1.3), *(1.15 * np.abs(np.log2(statistics["estimate"])))])
    norm = CenteredNorm(vcenter=0.0, halfrange=reach)
    for worker, ax in panels.items():
        _draw_map(ax, statistics[statistics["worker"] == worker], names, concurrencies, norm)
        _say_missing(ax, [name in planned[worker] for name in names])
    bar = figure.colorbar(
        mpl.cm.ScalarMappable(norm, "PuOr"),
        ax=list(panels.values()),
        label="throughput / baseline",
        aspect=30,
    )
    ticks = [ratio for ratio in _RATIO_TICKS if abs(np.log2(ratio)) <= reach]
    bar.set_ticks([float(np.log2(ratio)) for ratio in ticks], labels=[f"{ratio:g}" for ratio in ticks])
    small = interval_note(statistics, "small: 95 % interval")
    note = "; ".join(["purple: faster than the baseline of the same block, orange: slower", *small])
    finish(figure, "Throughput relative to the baseline, per cell", Provenance.of(results), note, legend={})
    return figure


def latency_throughput(results: pd.DataFrame) -> Figure:
    """Median time per output token against throughput per arm, one point per concurrency."""
    figure, (panels,) = worker_panels(results)
    points = cell_statistics(results).merge(
        cell_statistics(results, "tpot_ms_p50"),
        on=["worker", "arm_name", "concurrency"],
        suffixes=("_tok_s", "_ms"),
    )
    for worker, ax in panels.items():
        own = _of(points, worker)
        names = sorted(set(own["arm_name"]), key=arm_sort_key)
        for name in names:
            rows, look = own[own["arm_name"] == name], style(name, names)
            ax.plot(
                rows["estimate_tok_s"],
                rows["estimate_ms"],
                color=look.colour,
                marker=look.marker,
                linestyle=look.line,
                linewidth=1.6,
                markersize=6,
                label=label(name),
            )
        _number_points(ax, own)
        ax.set_xlabel("output tokens per second")
    first = next(iter(panels.values()))
    first.set_ylabel("ms per output token (median request)")
    first.set_ylim(bottom=0)
    first.set_xlim(left=0)
    note = "means over repeats; numbers: concurrency of baseline and static; right and down is better"
    finish(figure, "Latency against throughput", Provenance.of(results), note)
    return figure


def accept_length(results: pd.DataFrame) -> Figure:
    """Accept length (tokens per speculative step and request) of each speculating arm against concurrency."""
    figure, (panels,) = worker_panels(results)
    statistics = cell_statistics(steady_accept_length(results), "accept_length")
    for worker, ax in panels.items():
        draw_arms(ax, statistics[statistics["worker"] == worker])
        ax.axhline(1.0, color=GREY, linewidth=1)
    first = next(iter(panels.values()))
    first.set_ylabel("accept length\n(tokens per speculative step and request)")
    first.set_ylim(0.9, max([2.0, *(1.1 * statistics["estimate"])]))
    concurrency_axis(panels.values(), _concurrencies(results))
    counted = f"plain steps not counted; cells with fewer than {LEAST_STEPS} speculative steps have no point"
    note = "; ".join([counted, *interval_note(statistics, BARS), SIDE_BY_SIDE])
    finish(figure, "Accept length", Provenance.of(results), note)
    return figure


def _of(table: pd.DataFrame, worker: str) -> pd.DataFrame:
    """The rows of a worker, and the baseline's, which is everybody's."""
    return table[table["worker"].isin([worker, "none"])]


def _concurrencies(results: pd.DataFrame) -> list[int]:
    return sorted({int(concurrency) for concurrency in results["concurrency"]})


def _planned_arms(results: pd.DataFrame, worker: str) -> set[str]:
    """Every arm of a worker in the run, those of failed cells too."""
    rows = results[results["worker"] == worker]
    return {arm_name(arm, threshold) for arm, threshold in zip(rows["arm"], rows["threshold"], strict=True)}


def _draw_map(
    ax: Axes, statistics: pd.DataFrame, names: Sequence[str], concurrencies: Sequence[int], norm: CenteredNorm
) -> None:
    keys = zip(statistics["arm_name"], statistics["concurrency"].astype(int), strict=True)
    cells = dict(zip(keys, statistics[["estimate", "low", "high", "n"]].to_numpy(dtype=float), strict=True))
    ratios = np.full((len(names), len(concurrencies)), np.nan)
    to = " to " if len(concurrencies) <= _WIDE_CELLS else " to\n"
    for y, name in enumerate(names):
        for x, concurrency in enumerate(concurrencies):
            if (name, concurrency) not in cells:
                continue
            ratio, low, high, repeats = cells[name, concurrency]
            ratios[y, x] = np.log2(ratio)
            colour = "white" if abs(ratios[y, x]) > 0.6 * float(norm.halfrange or 1.0) else "black"
            known = repeats >= LEAST_REPEATS
            place: dict[str, Any] = {"ha": "center", "va": "center", "textcoords": "offset points"}
            place |= {"xy": (x, y), "color": colour}
            ax.annotate(f"{ratio:.2f}", xytext=(0, 5 * known), fontweight="bold", **place)
            if known:
                ax.annotate(f"{low:.2f}{to}{high:.2f}", xytext=(0, -9), fontsize=6.5, **place)
    ax.imshow(ratios, cmap="PuOr", norm=norm, aspect="auto")
    ax.grid(False)
    ax.set_xticks(range(len(concurrencies)), [str(c) for c in concurrencies])
    ax.set_yticks(range(len(names)), [label(name).replace(", ", ",\n") for name in names])
    ax.set_xlabel("concurrency (requests in flight)")


def _say_missing(ax: Axes, planned: Sequence[bool]) -> None:
    """Name the empty cells of a map: those of an arm that was planned for this worker, and whole arms that were not."""
    ratios = np.asarray(ax.images[0].get_array(), dtype=float)
    words: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "color": GREY}
    for y, row in enumerate(ratios):
        if not planned[y]:
            ax.text((len(row) - 1) / 2, y, "not in this run", **words)
            continue
        for x in np.flatnonzero(np.isnan(row)):
            ax.text(float(x), y, "not\nmeasured", **words)


def _number_points(ax: Axes, points: pd.DataFrame) -> None:
    """Write the concurrency at the points of baseline and static: above the slower of the two, below the faster."""
    arms = points[points["arm_name"].isin(["baseline", "static"])]
    slowest = arms.groupby("concurrency")["estimate_ms"].transform("max")
    for row, most_ms in zip(arms.itertuples(), slowest, strict=True):
        ax.annotate(
            str(row.concurrency),
            (row.estimate_tok_s, row.estimate_ms),
            xytext=(-5, 6) if row.estimate_ms == most_ms else (5, -6),
            textcoords="offset points",
            ha="right" if row.estimate_ms == most_ms else "left",
            va="center",
            fontsize=8.5,
            color=style(str(row.arm_name)).colour,
            path_effects=[withStroke(linewidth=1.5, foreground="white")],
            zorder=5,
        )
