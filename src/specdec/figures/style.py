"""What all figures share: how an arm is drawn, panels per worker, title, foot, and how a figure is kept.

Arms keep their colour (Okabe and Ito's palette, which colour-blind readers can tell apart), marker and line
style in every figure, so that a print in grey can be read too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator
from matplotlib.transforms import ScaledTranslation, Transform

from specdec.analysis.stats import CELL, arm_sort_key, measured

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#7F7F7F"
INDIGO, PLUM, MAGENTA = "#4B2E83", "#8E2C78", "#A98AD8"

Dashes = str | tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Style:
    """How one arm is drawn."""

    colour: str
    marker: str
    line: Dashes


_STYLES = {
    "baseline": Style(BLACK, "o", "-"),
    "static": Style(VERMILLION, "s", "--"),
    "off": Style(GREY, "X", ":"),
    "adaptive": Style(PURPLE, "*", "-"),
}
_DYNAMIC = [
    Style(BLUE, "^", "-"),
    Style(GREEN, "v", (0, (5, 1))),
    Style(SKY, "D", "-."),
    Style(ORANGE, "<", (0, (3, 1, 1, 1))),
]
_ADAPTIVE = [
    Style(INDIGO, "P", (0, (5, 1, 1, 1))),
    Style(PLUM, "p", (0, (2, 1))),
    Style(MAGENTA, "h", "-."),
]
_LABELS = {"static": "static EAGLE-3", "off": "off (threshold 0)", "adaptive": "SGLang adaptive, default tiers"}
_SHIFT_PT = 3.2  # between two arms at the same concurrency
_WIDTH_IN = 10.0  # of a figure of one or two panels
_TITLE_CHARACTERS = 56  # of a panel's title in half of that width
_LEFT = 0.012  # margin of title, legend and foot, share of the figure's width
_CHARACTERS_A_LINE = 175  # of the foot's size in that width
RC: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.hashsalt": "specdec",  # the same data give the same file
}


# A 95 % interval from two values spans 13 standard errors: it is true, says nothing and hides the rest of a figure.
LEAST_REPEATS = 3


@dataclass(frozen=True)
class Provenance:
    """Where a figure's numbers come from, for its foot."""

    repeats: str
    model: str
    profile: str
    release: str
    machine: str

    @classmethod
    def of(cls, results: pd.DataFrame) -> Provenance:
        """That of a run's table. Several machines or releases are all named."""
        counts = measured(results, "output_tok_s").groupby(CELL).size()
        low, high = (int(counts.min()), int(counts.max())) if len(counts) else (0, 0)
        repeats = f"n = {low} to {high} repeats" if low != high else f"n = {low} repeat{'s' if low > 1 else ''}"
        return cls(
            repeats=f"{repeats}, so no interval" if high < LEAST_REPEATS else repeats,
            model=_all(results["model"]),
            profile=_all(results["profile"]),
            release=_all(results["sglang"]),
            machine=_all(results["machine"]),
        )

    @property
    def source(self) -> str:
        """Model, release and machine in one sentence."""
        return f"Model {self.model} (profile {self.profile}), SGLang {self.release}, on {self.machine}."


def style(name: str, names: Iterable[str] = ()) -> Style:
    """The style of an arm (`stats.arm_name`); those with a threshold by the order of the thresholds in
    `names`.
    """
    if name in _STYLES:
        return _STYLES[name]
    arm, _, _ = name.partition(" ")
    alike = sorted({n for n in names if n.startswith(f"{arm} ")} | {name}, key=arm_sort_key)
    styles = {"dynamic": _DYNAMIC, "adaptive": _ADAPTIVE}[arm]
    return styles[alike.index(name) % len(styles)]


def label(name: str) -> str:
    """An arm's name as figures show it: "dynamic 4" becomes "dynamic, threshold 4"."""
    arm, _, threshold = name.partition(" ")
    if not threshold:
        return _LABELS.get(name, name)
    return f"SGLang adaptive, tiers at {threshold}" if arm == "adaptive" else f"{arm}, threshold {threshold}"


def worker_panels(results: pd.DataFrame, rows: int = 1, height: float = 5.6) -> tuple[Figure, list[dict[str, Axes]]]:
    """A 16:9 figure (wider beyond two workers) with a column per worker; per row, the panel of each worker.

    Panels of a row share their y axis. Raises ValueError if the run has no speculating worker.
    """
    workers = sorted(set(results["worker"]) - {"none"})
    if not workers:
        raise ValueError("the run holds no speculating worker to draw")
    with mpl.rc_context(RC):
        figure = Figure(figsize=(_WIDTH_IN * max(1, len(workers) / 2), height), dpi=150, layout="constrained")
        grid = figure.subplots(
            rows, len(workers), squeeze=False, sharex=True, sharey="row", height_ratios=[3, 2][:rows]
        )
    for worker, ax in zip(workers, grid[0], strict=True):
        title = textwrap.fill(worker_title(results, worker), _TITLE_CHARACTERS if len(workers) > 1 else 200)
        ax.set_title(title, loc="left", fontsize=10)
    return figure, [dict(zip(workers, row, strict=True)) for row in grid]


def worker_title(results: pd.DataFrame, worker: str) -> str:
    """ "v1: EAGLEWorker, topk 4, 16 draft tokens", as far as the server told it."""
    # SGLang's own switch changes the shape of the draft: the title has what the others are given.
    rows = results[(results["worker"] == worker) & (results["arm"] != "adaptive")]
    parts: list[str] = []
    for column, text in (
        ("worker_class", "{}"),
        ("topk", "topk {}"),
        ("num_draft_tokens", "{} draft tokens"),
    ):
        if column in rows:
            parts += [text.format(value) for value in rows[column].dropna().unique()]
    return f"Worker {worker}" + (": " + ", ".join(parts) if parts else "")


def interval_note(statistics: pd.DataFrame, words: str) -> list[str]:
    """What the foot says of the intervals of `statistics` (column n): nothing where none is drawn."""
    enough = statistics["n"] >= LEAST_REPEATS
    if not enough.any():
        return []
    return [words if enough.all() else f"{words} where n is {LEAST_REPEATS} or more"]


def draw_arms(ax: Axes, statistics: pd.DataFrame) -> None:
    """One line per arm of `statistics` (arm_name, estimate, low, high); bars a little apart so that all are
    seen.
    """
    names = sorted(set(statistics["arm_name"]), key=arm_sort_key)
    grid = sorted(set(statistics["concurrency"]))
    for position, name in enumerate(names):
        rows = statistics[statistics["arm_name"] == name].set_index("concurrency").reindex(grid)
        look, place = style(name, names), arm_place(ax, position, len(names))
        at, middle = np.array(grid, dtype=float), rows["estimate"].to_numpy(dtype=float)
        ax.plot(
            at,
            middle,
            color=look.colour,
            marker=look.marker,
            linestyle=look.line,
            linewidth=1.6,
            markersize=6,
            label=label(name),
            transform=place,
        )
        low, high = rows["low"].to_numpy(dtype=float), rows["high"].to_numpy(dtype=float)
        known = ~np.isnan(low) & (rows["n"].to_numpy(dtype=float) >= LEAST_REPEATS)
        low, high = np.where(known, low, np.nan), np.where(known, high, np.nan)
        if known.any():
            bars = np.array([middle - low, high - middle])[:, known]
            ax.errorbar(
                at[known],
                middle[known],
                bars,
                fmt="none",
                ecolor=look.colour,
                elinewidth=1.1,
                capsize=2.5,
                alpha=0.8,
                transform=place,
            )
        # A moved artist does not count for the axes' limits.
        edges = np.concatenate([middle, low, high])
        ax.update_datalim(np.column_stack([np.tile(at, 3), edges])[~np.isnan(edges)])
        ax.autoscale_view(scalex=False)


def arm_place(ax: Axes, position: int, arms: int) -> Transform:
    """Where an arm is drawn: beside its neighbours at the same concurrency, so that all are seen."""
    shift_pt = _SHIFT_PT * (position - (arms - 1) / 2)
    return ax.transData + ScaledTranslation(shift_pt / 72, 0, ax.figure.dpi_scale_trans)


def concurrency_axis(axes: Iterable[Axes], concurrencies: Sequence[int]) -> None:
    """A log2 axis with the measured values, and nothing else, as ticks. To be called after drawing."""
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.set_xlim(concurrencies[0] / 1.3, concurrencies[-1] * 1.3)
        ax.xaxis.set_major_locator(FixedLocator([float(c) for c in concurrencies]))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xticklabels([str(c) for c in concurrencies])
        ax.set_xlabel("concurrency (requests in flight)")


def finish(figure: Figure, title: str, about: Provenance, note: str, legend: dict[str, Artist] | None = None) -> None:
    """Title, legend (without `legend`: of all labelled lines, each once) and foot."""
    if legend is None:
        legend = {}
        for ax in figure.axes:
            for handle, text in zip(*ax.get_legend_handles_labels(), strict=True):
                legend.setdefault(text, handle)
    lines = _draw_legend(figure, legend) if legend else 0
    # Blank lines of the title keep the legend's place.
    figure.suptitle(title + "\n" * lines, x=_LEFT, ha="left", fontweight="bold", fontsize=14)
    characters = int(_CHARACTERS_A_LINE * figure.get_figwidth() / _WIDTH_IN)
    foot = "\n".join(textwrap.wrap(f"{about.repeats}; {note}. {about.source}", characters))
    figure.supxlabel(foot, x=_LEFT, ha="left", fontsize=7.5, color="#444444")


def _draw_legend(figure: Figure, legend: dict[str, Artist]) -> int:
    """Below the title, in as few lines as fit the figure's width; how many that are."""
    below_title = 1 - 0.33 / figure.get_figheight()
    for lines in range(-(-len(legend) // 5), len(legend) + 1):
        drawn = figure.legend(
            list(legend.values()),
            list(legend),
            loc="upper left",
            bbox_to_anchor=(_LEFT, below_title),
            ncols=-(-len(legend) // lines),
            fontsize=9.5,
            frameon=False,
            borderpad=0.0,
            borderaxespad=0.0,
            columnspacing=1.5,
        )
        if drawn.get_window_extent().width <= (1 - 2 * _LEFT) * figure.bbox.width or lines == len(legend):
            break
        drawn.remove()
    return lines


def save_figure(figure: Figure, folder: str | Path, name: str) -> list[Path]:
    """Write `name`.png and `name`.svg into `folder` (made if missing), without dates; returns the two
    paths.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with mpl.rc_context(RC):
        figure.savefig(paths[0], metadata={"Software": None})
        figure.savefig(paths[1], metadata={"Date": None, "Creator": None})
    return paths


def figure_data(figure: Figure) -> str:
    """What a figure shows, as text: title, panels, each labelled series (summed up beyond 40 points), foot.

    This is what tests and nbval compare: two machines draw the same data with different pixels.
    """
    lines = [figure.get_suptitle()]
    for ax in figure.axes:
        if ax.get_label() == "<colorbar>":
            continue
        lines.append(f"[{ax.get_title(loc='left')}] {ax.get_ylabel()} against {ax.get_xlabel()}".replace("\n", " "))
        lines += [f"  {_series(line)}" for line in ax.lines if not str(line.get_label()).startswith("_")]
        lines += [f"  {bars.get_label()}: {_heights(bars)}" for bars in ax.containers if isinstance(bars, BarContainer)]
        lines += [f"  {text.get_text()}".replace("\n", " ") for text in ax.texts]
    return "\n".join([*lines, figure.get_supxlabel()])


def _series(line: Line2D) -> str:
    x, y = (np.asarray(values, dtype=float) for values in (line.get_xdata(), line.get_ydata()))
    if len(x) > 40:
        return f"{line.get_label()}: {len(x)} points from {np.nanmin(y):.4g} to {np.nanmax(y):.4g}"
    return f"{line.get_label()}: " + ", ".join(f"({a:.4g}, {b:.4g})" for a, b in zip(x, y, strict=True))


def _heights(bars: BarContainer) -> str:
    return ", ".join(f"{bar.get_height():.4g}" for bar in bars)


def _all(column: pd.Series[str]) -> str:
    return " and ".join(sorted({str(value) for value in column.dropna()})) or "unknown"
