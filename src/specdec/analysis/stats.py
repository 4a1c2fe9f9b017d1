"""Means, paired ratios and their intervals over the repeats of a run.

Tables are those of `results.read_results`: one row per measured cell. A cell that failed (`error` set) or
that lacks the number asked for is left out; it never counts as zero. Ratios are averaged as logarithms, so
that 2x and 0.5x cancel. Intervals are Student's t at 95 % and missing (NaN) where there are fewer than two
repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import stdtrit

CONFIDENCE = 0.95
LEAST_STEPS = 20  # speculative steps for an accept length: fewer scatter by tenths
CELL = ["worker", "arm_name", "concurrency"]
_ARM_ORDER = {"baseline": 0, "static": 1, "off": 2, "dynamic": 3, "adaptive": 4}


@dataclass(frozen=True)
class Interval:
    """An estimate over `n` repeats and its 95 % interval, in the estimate's unit; NaN where there is none."""

    estimate: float
    low: float
    high: float
    n: int

    @property
    def known(self) -> bool:
        """Whether there were enough repeats for an interval."""
        return not np.isnan(self.low)


def mean_interval(values: Sequence[float] | npt.NDArray[np.float64]) -> Interval:
    """The mean of `values` and its t-interval."""
    array = np.asarray(values, dtype=float)
    array = array[~np.isnan(array)]
    if len(array) == 0:
        return Interval(np.nan, np.nan, np.nan, 0)
    mean = float(array.mean())
    if len(array) == 1:
        return Interval(mean, np.nan, np.nan, 1)
    half = t_quantile(len(array) - 1) * float(array.std(ddof=1)) / np.sqrt(len(array))
    return Interval(mean, mean - half, mean + half, len(array))


def ratio_interval(ratios: Sequence[float] | npt.NDArray[np.float64]) -> Interval:
    """The geometric mean of `ratios` (all > 0) and its interval."""
    logs = mean_interval(np.log(np.asarray(ratios, dtype=float)))
    return Interval(float(np.exp(logs.estimate)), float(np.exp(logs.low)), float(np.exp(logs.high)), logs.n)


def t_quantile(degrees: float, confidence: float = CONFIDENCE) -> float:
    """Half-width of a two-sided t-interval in standard errors."""
    return float(stdtrit(degrees, 0.5 + confidence / 2))


def holm(p_values: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """p-values adjusted for many comparisons (Holm 1979): the chance of one false claim in the whole family
    is kept.
    """
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p)
    stepped = np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order])
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def arm_name(arm: str, threshold: int | float | None) -> str:
    """The name of an arm in tables: "baseline", "static", "off", "dynamic 4", "adaptive 4" (its tiers switch
    at 4), "adaptive" (its default tiers).
    """
    if arm in ("dynamic", "adaptive") and threshold is not None and not pd.isna(threshold):
        return f"{arm} {int(threshold)}"
    return arm


def arm_sort_key(name: str) -> tuple[int, int]:
    """Order of arm names: baseline, static, off, dynamic by threshold, adaptive with default tiers, then by
    theirs.
    """
    arm, _, threshold = name.partition(" ")
    return _ARM_ORDER.get(arm, len(_ARM_ORDER)), int(threshold or 0)


def measured(results: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows whose `metric` was measured, with the column `arm_name`."""
    rows = results[results["error"].isna() & results[metric].notna()].copy()
    rows["arm_name"] = [arm_name(arm, threshold) for arm, threshold in zip(rows["arm"], rows["threshold"], strict=True)]
    rows[metric] = rows[metric].astype(float)
    return rows


def steady_accept_length(results: pd.DataFrame) -> pd.DataFrame:
    """The table without the accept lengths of cells that hardly speculated (a few steps at their very end)."""
    return results.assign(accept_length=results["accept_length"].where(results["speculative_steps"] >= LEAST_STEPS))


def cell_statistics(results: pd.DataFrame, metric: str = "output_tok_s") -> pd.DataFrame:
    """Per worker, arm and concurrency: mean of `metric` over the repeats, its interval and n."""
    return _per_cell(measured(results, metric), metric, mean_interval)


def paired_ratios(results: pd.DataFrame, metric: str = "output_tok_s", to: str = "baseline") -> pd.DataFrame:
    """Each cell's `metric` divided by that of the arm `to` in the same block (repeat) and at the same
    concurrency.

    Pairing inside a block cancels what drifts from block to block (heat, neighbours, clock). Static and the
    other speculating arms are looked up for the same worker, the baseline for all. Cells without a partner
    are left out.

    Returns the measured rows of the other arms with the column `ratio`.
    """
    rows = measured(results, metric)
    keys = ["repeat", "concurrency"] if to == "baseline" else ["worker", "repeat", "concurrency"]
    partner = rows.loc[rows["arm_name"] == to, [*keys, metric]].rename(columns={metric: "partner"})
    others = rows[rows["arm_name"] != to]
    paired = others.merge(partner, on=keys, how="inner", validate="many_to_one")
    paired["ratio"] = paired[metric] / paired["partner"]
    return paired


def ratio_statistics(results: pd.DataFrame, metric: str = "output_tok_s", to: str = "baseline") -> pd.DataFrame:
    """Per worker, arm and concurrency: the paired ratio to the arm `to`, its interval and n."""
    return _per_cell(paired_ratios(results, metric, to), "ratio", ratio_interval)


def envelope(results: pd.DataFrame) -> pd.DataFrame:
    """Per worker and concurrency the better of baseline and static EAGLE-3, by mean output tok/s.

    Columns: worker, concurrency, envelope_arm, envelope_tok_s. Only concurrencies at which both were
    measured: the better of one is no envelope. Taking the better of two noisy means leans upwards a little;
    where the two are within each other's noise, the distance of a third arm from it looks slightly larger
    than it is.
    """
    means = cell_statistics(results).set_index(CELL)["estimate"]
    records = []
    for worker in _workers(results):
        for concurrency in sorted(set(results["concurrency"])):
            baseline = means.get(("none", "baseline", concurrency))
            static = means.get((worker, "static", concurrency))
            if baseline is None or static is None:
                continue
            arm = "static" if static > baseline else "baseline"
            records.append((worker, int(concurrency), arm, max(float(static), float(baseline))))
    return pd.DataFrame(records, columns=["worker", "concurrency", "envelope_arm", "envelope_tok_s"])


def envelope_distance(results: pd.DataFrame) -> pd.DataFrame:
    """Per worker, dynamic arm and concurrency: its throughput over that of the envelope, paired by block.

    Columns: worker, arm_name, concurrency, estimate (ratio, 1.0 = on the envelope), low, high, n,
    envelope_arm.
    """
    table = envelope(results)
    pieces = []
    for arm in ("baseline", "static"):
        ratios = ratio_statistics(results, to=arm)
        pieces.append(ratios.merge(table[table["envelope_arm"] == arm], on=["worker", "concurrency"]))
    joined = pd.concat(pieces, ignore_index=True)
    joined = joined[~joined["arm_name"].isin(["baseline", "static"])]
    return _sorted(joined.drop(columns="envelope_tok_s"))


def _workers(results: pd.DataFrame) -> list[str]:
    return sorted(set(results["worker"]) - {"none"})


def _per_cell(rows: pd.DataFrame, column: str, interval: Callable[[npt.NDArray[np.float64]], Interval]) -> pd.DataFrame:
    records = []
    for key, group in rows.groupby(CELL, sort=False):
        found = interval(group[column].to_numpy(dtype=float))
        records.append((*key, found.estimate, found.low, found.high, found.n))
    return _sorted(pd.DataFrame(records, columns=[*CELL, "estimate", "low", "high", "n"]))


def _sorted(table: pd.DataFrame) -> pd.DataFrame:
    """By worker, arm in its own order, concurrency."""
    if table.empty:
        return table
    keys = table["arm_name"].map(arm_sort_key)
    order = sorted(
        range(len(table)), key=lambda i: (table["worker"].iloc[i], keys.iloc[i], table["concurrency"].iloc[i])
    )
    return table.iloc[order].reset_index(drop=True)
