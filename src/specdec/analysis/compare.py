"""Two runs held against each other, cell by cell: better, worse, same or unclear.

What is compared, B over A:
- throughput and latency of speculating arms as their paired ratio to the baseline of the same block, since that
  survives another machine and a slow day; where a run has no baseline, as they are, on the same machine only;
- throughput and latency of the baseline as they are, on the same machine only;
- accept length as it is, of cells with enough speculative steps: it does not depend on the machine's speed.

Differences are of means of logarithms. With a handful of repeats a cell's own deviation is a guess, so the
cells of one metric and concurrency share theirs (a noisier cell keeps its own). p-values are adjusted for
the number of comparisons in the whole table (Holm), so that a clean rerun is called worse in at most about
1 of 20 tables.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import stdtr

from specdec.analysis.stats import arm_sort_key, holm, measured, paired_ratios, steady_accept_length, t_quantile

Verdict = Literal["better", "worse", "same", "unclear"]
MARGIN = 0.05
"""Equivalence margin: a change within 5 % is "same" (if that is sure), and never better or worse."""
ALPHA = 0.05
Array = npt.NDArray[np.float64]
_Key = tuple[str, str, int]
_Group = tuple[str, bool, int]
HIGHER_IS_BETTER = {"output_tok_s": True, "ttft_ms_p50": False, "tpot_ms_p50": False, "accept_length": True}


@dataclass(frozen=True)
class Comparison:
    """One metric of one cell, B over A. `low`, `high`: 95 % interval of `ratio`, None without repeats."""

    worker: str
    arm: str
    concurrency: int
    metric: str
    relative_to_baseline: bool
    ratio: float
    low: float | None
    high: float | None
    repeats_a: int
    repeats_b: int
    verdict: Verdict


@dataclass(frozen=True)
class Report:
    """The comparison of run B with run A."""

    name_a: str
    name_b: str
    comparisons: tuple[Comparison, ...]
    failed: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def regression(self) -> bool:
        """Whether any cell is worse in B, or measured in A and failed in B."""
        return bool(self.failed) or any(c.verdict == "worse" for c in self.comparisons)

    @property
    def exit_code(self) -> int:
        """1 on a regression, else 0."""
        return int(self.regression)

    def counts(self) -> dict[str, int]:
        """Comparisons by verdict."""
        return {v: sum(c.verdict == v for c in self.comparisons) for v in ("better", "worse", "same", "unclear")}


@dataclass(frozen=True)
class _Sample:
    """Logarithms of one metric of one cell over the repeats of both runs."""

    worker: str
    arm: str
    concurrency: int
    metric: str
    relative: bool
    a: Array
    b: Array

    @property
    def group(self) -> _Group:
        """Samples of one group share their spread; ratios inside a block vary less than plain values."""
        return self.metric, self.relative, self.concurrency


def compare_runs(a: pd.DataFrame, b: pd.DataFrame, name_a: str = "A", name_b: str = "B") -> Report:
    """Run B against run A (tables of `results.read_results`).

    Raises ValueError in one line if they have nothing in common.
    """
    same_machine = set(a["machine"].dropna()) == set(b["machine"].dropna())
    samples, notes = _samples(a, b, same_machine)
    if not samples:
        reason = "; ".join(notes) or "other arms or concurrencies"
        raise ValueError(f"{name_a} and {name_b} have no cell in common to compare ({reason})")
    comparisons = _judge(samples)
    if any(min(c.repeats_a, c.repeats_b) < 2 for c in comparisons):
        notes.append("cells with fewer than 2 repeats in a run have no interval and stay unclear")
    return Report(name_a, name_b, tuple(comparisons), _failed(a, b), tuple(notes))


def _samples(a: pd.DataFrame, b: pd.DataFrame, same_machine: bool) -> tuple[list[_Sample], list[str]]:
    notes = []
    relative = all((run["arm"] == "baseline").any() for run in (a, b))
    if not same_machine:
        notes.append("different machines: the baseline's own speed is not compared")
    if not relative:
        notes.append(
            "a run has no baseline: throughput and latency are compared as they are"
            if same_machine
            else "a run has no baseline: only accept length is compared"
        )
    samples: list[_Sample] = []
    for metric in HIGHER_IS_BETTER:
        if metric == "accept_length":
            steady_a, steady_b = (measured(steady_accept_length(run), metric) for run in (a, b))
            samples += _pair(steady_a, steady_b, metric, relative=False)
            continue
        plain_a, plain_b = measured(a, metric), measured(b, metric)
        if same_machine and relative:
            plain_a, plain_b = (run[run["arm"] == "baseline"] for run in (plain_a, plain_b))
        if same_machine:
            samples += _pair(plain_a, plain_b, metric, relative=False)
        if relative:
            samples += _pair(paired_ratios(a, metric), paired_ratios(b, metric), metric, relative=True)
    return samples, notes


def _pair(a: pd.DataFrame, b: pd.DataFrame, metric: str, relative: bool) -> list[_Sample]:
    """The cells that both tables hold."""
    column = "ratio" if relative else metric
    cells_a, cells_b = _cells(a, column), _cells(b, column)
    common = sorted(set(cells_a) & set(cells_b), key=_order)
    return [_Sample(*key, metric, relative, np.log(cells_a[key]), np.log(cells_b[key])) for key in common]


def _cells(rows: pd.DataFrame, column: str) -> dict[_Key, Array]:
    """The repeats of `column` by worker, arm name and concurrency."""
    found: dict[_Key, list[float]] = {}
    columns = (rows["worker"], rows["arm_name"], rows["concurrency"], rows[column])
    for worker, arm, concurrency, value in zip(*columns, strict=True):
        found.setdefault((str(worker), str(arm), int(concurrency)), []).append(float(value))
    return {key: np.array(values) for key, values in found.items()}


def _order(key: _Key) -> tuple[str, tuple[int, int], int]:
    worker, arm, concurrency = key
    return worker, arm_sort_key(arm), concurrency


def _failed(a: pd.DataFrame, b: pd.DataFrame) -> tuple[str, ...]:
    """Cells that A measured and of which every repeat failed in B."""
    tried = b.assign(error=None, output_tok_s=b["output_tok_s"].fillna(0.0))
    ok_a, ok_b, tried_b = (set(_cells(measured(run, "output_tok_s"), "output_tok_s")) for run in (a, b, tried))
    return tuple(
        f"worker {worker}, {arm}, concurrency {concurrency}"
        for worker, arm, concurrency in sorted((ok_a & tried_b) - ok_b, key=_order)
    )


def _judge(samples: Sequence[_Sample]) -> list[Comparison]:
    spread = _shared_spread(samples)
    rows = []
    for sample in samples:
        difference = float(sample.b.mean() - sample.a.mean())
        error, degrees = _error(sample, *spread[sample.group])
        rows.append((sample, difference, error, degrees))
    p_change = holm([_p_two_sided(d, error, degrees) for _, d, error, degrees in rows])
    p_same = holm([_p_not_equivalent(d, error, degrees) for _, d, error, degrees in rows])
    return [
        _comparison(sample, d, error, degrees, change < ALPHA, same < ALPHA)
        for (sample, d, error, degrees), change, same in zip(rows, p_change, p_same, strict=True)
    ]


def _shared_spread(samples: Sequence[_Sample]) -> dict[_Group, tuple[float, int]]:
    """Per group of samples: standard deviation of a log value over repeats, and its degrees of
    freedom.
    """
    squares: dict[_Group, tuple[float, int]] = {}
    for sample in samples:
        total, degrees = squares.get(sample.group, (0.0, 0))
        for values in (sample.a, sample.b):
            total += float(((values - values.mean()) ** 2).sum())
            degrees += len(values) - 1
        squares[sample.group] = (total, degrees)
    return {key: (float(np.sqrt(t / d)) if d else np.nan, d) for key, (t, d) in squares.items()}


def _error(sample: _Sample, shared: float, degrees: int) -> tuple[float, int]:
    """Standard error of the log ratio and its degrees of freedom; NaN if a run has a single repeat."""
    if min(len(sample.a), len(sample.b)) < 2:
        return np.nan, 0
    variances = [max(float(v.std(ddof=1)), shared) ** 2 / len(v) for v in (sample.a, sample.b)]
    return max(float(np.sqrt(sum(variances))), 1e-9), degrees


def _p_two_sided(difference: float, error: float, degrees: int) -> float:
    return 1.0 if np.isnan(error) else float(2 * stdtr(degrees, -abs(difference) / error))


def _p_not_equivalent(difference: float, error: float, degrees: int) -> float:
    """p-value of "the change is beyond the margin" (two one-sided tests)."""
    if np.isnan(error):
        return 1.0
    margin = np.log1p(MARGIN)
    return float(stdtr(degrees, (abs(difference) - margin) / error))


def _comparison(
    sample: _Sample, difference: float, error: float, degrees: int, changed: bool, equivalent: bool
) -> Comparison:
    half = np.nan if np.isnan(error) else t_quantile(degrees) * error
    verdict: Verdict = "unclear"
    if changed and abs(difference) > np.log1p(MARGIN):
        verdict = "better" if (difference > 0) == HIGHER_IS_BETTER[sample.metric] else "worse"
    elif equivalent:
        verdict = "same"
    return Comparison(
        worker=sample.worker,
        arm=sample.arm,
        concurrency=sample.concurrency,
        metric=sample.metric,
        relative_to_baseline=sample.relative,
        ratio=float(np.exp(difference)),
        low=None if np.isnan(half) else float(np.exp(difference - half)),
        high=None if np.isnan(half) else float(np.exp(difference + half)),
        repeats_a=len(sample.a),
        repeats_b=len(sample.b),
        verdict=verdict,
    )


_HEADER = ("worker", "arm", "concurrency", "metric", "B/A", "95 % interval", "n A, B", "verdict")


def _row(c: Comparison) -> tuple[str, ...]:
    metric = c.metric + (" / baseline" if c.relative_to_baseline else "")
    interval = "-" if c.low is None or c.high is None else f"{c.low:.3f} to {c.high:.3f}"
    repeats = f"{c.repeats_a}, {c.repeats_b}"
    return (c.worker, c.arm, str(c.concurrency), metric, f"{c.ratio:.3f}", interval, repeats, c.verdict)


def _summary(report: Report) -> list[str]:
    counts = ", ".join(f"{count} {verdict}" for verdict, count in report.counts().items())
    return [
        f"A = {report.name_a}, B = {report.name_b}: {counts}",
        f"same: within {MARGIN:.0%}; verdicts hold at {1 - ALPHA:.0%} for the whole table (Holm)",
        *(f"failed in every repeat of B: {cell}" for cell in report.failed),
        *report.notes,
    ]


def as_text(report: Report) -> str:
    """The report for a terminal."""
    rows = [_HEADER, *(_row(c) for c in report.comparisons)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", *_summary(report)])


def as_markdown(report: Report) -> str:
    """The report as a Markdown table."""
    rows = [_HEADER, ("---",) * len(_HEADER), *(_row(c) for c in report.comparisons)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *(f"- {line}" for line in _summary(report))])


def as_json(report: Report) -> str:
    """The report for programs."""
    return json.dumps(
        {
            "a": report.name_a,
            "b": report.name_b,
            "margin": MARGIN,
            "alpha": ALPHA,
            "regression": report.regression,
            "counts": report.counts(),
            "failed": list(report.failed),
            "notes": list(report.notes),
            "comparisons": [asdict(c) for c in report.comparisons],
        },
        indent=1,
    )


FORMATS = {"text": as_text, "markdown": as_markdown, "json": as_json}
