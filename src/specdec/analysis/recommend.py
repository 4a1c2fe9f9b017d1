"""Which threshold a run recommends, and how sure that is.

The evidence is the paired ratio static / baseline at each measured batch size: above 1.0 a speculative step
pays there, below it a plain step does. The threshold is the batch size where the ratio falls through 1.0.
That takes an "off" that costs nothing against the baseline; what off really costs is measured by the
dynamic arms, whose gains over the whole grid stand beside the recommendation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import stdtr

from specdec.analysis.stats import holm, paired_ratios, ratio_interval, t_quantile

MARGIN = 0.05
"""Gains and losses below 5 % are not worth a switch."""
_DRAWS = 4000
_SEED = 20260101
Array = npt.NDArray[np.float64]


class Answer(Enum):
    """What the measurements say, in the words the report uses."""

    THRESHOLD = "threshold"
    ALWAYS = "speculation pays up to the highest batch measured: no threshold needed below it"
    NO_THRESHOLD = "no threshold helps"
    NOT_ENOUGH_DATA = "not enough data"


@dataclass(frozen=True)
class Recommendation:
    """The recommended threshold of one worker.

    `threshold`, `low`, `high`: batch sizes (requests in a decode step), the interval at 95 %; None unless the
    answer is THRESHOLD (or ALWAYS for `low`). `high` None with a threshold means "beyond the highest batch".
    """

    worker: str
    answer: Answer
    reason: str
    threshold: int | None = None
    low: int | None = None
    high: int | None = None

    @property
    def text(self) -> str:
        """One sentence for the report."""
        if self.answer is not Answer.THRESHOLD:
            return f"Worker {self.worker}: {self.answer.value} ({self.reason})."
        high = "or more" if self.high is None else f"to {self.high}"
        return (
            f"Worker {self.worker}: recommended threshold {self.threshold} "
            f"(95 % interval {self.low} {high}; {self.reason})."
        )


@dataclass(frozen=True)
class _Gain:
    """Log ratio static / baseline by batch size: mean, standard error, and the degrees of freedom of the
    latter.
    """

    batch: Array
    mean: Array
    error: Array
    degrees: int
    repeats: int


def recommend(results: pd.DataFrame) -> list[Recommendation]:
    """One recommendation per speculating worker of the run."""
    return [recommend_threshold(results, worker) for worker in sorted(set(results["worker"]) - {"none"})]


def recommendations(results: pd.DataFrame) -> str:
    """The recommendations in words, a line per worker."""
    return "\n".join(recommendation.text for recommendation in recommend(results))


def recommend_threshold(results: pd.DataFrame, worker: str) -> Recommendation:
    """The threshold that the paired ratios static / baseline of `worker` support.

    A threshold is named only if speculation is faster than the baseline at some batch size, at 95 % over
    all the batch sizes tried (Holm). "No threshold helps" needs evidence too: every gain is below `MARGIN`
    with the same confidence. Anything between is "not enough data".
    """
    gain = _gain(results, worker)
    if isinstance(gain, str):
        return Recommendation(worker, Answer.NOT_ENOUGH_DATA, gain)
    best = int(np.argmax(gain.mean))
    batch = int(gain.batch[best])
    seen = f"static EAGLE-3 at batch {batch} is {_ratio(gain, best)} the baseline, n = {gain.repeats}"
    if min(holm(_p_above(gain, 0.0))) >= 0.05:
        below_margin = max(1 - _p_above(gain, np.log1p(MARGIN))) < 0.05
        answer = Answer.NO_THRESHOLD if below_margin else Answer.NOT_ENOUGH_DATA
        return Recommendation(worker, answer, f"at best, {seen}")
    estimate = int(crossover(gain.batch, gain.mean[None, :])[0])
    if estimate == 0:
        return Recommendation(worker, Answer.NO_THRESHOLD, f"smaller batches lose more than it gains; {seen}")
    low, high = _crossover_interval(gain)
    highest = int(gain.batch[-1])
    if low >= highest:
        return Recommendation(worker, Answer.ALWAYS, f"measured up to batch {highest}; {seen}", low=highest)
    return Recommendation(worker, Answer.THRESHOLD, seen, estimate, low, None if high >= highest else high)


def crossover(batch: Array, log_ratio: Array) -> npt.NDArray[np.int64]:
    """The largest batch size that should speculate, for each row of log(static / baseline) at ascending
    batches.

    The measured batch up to which speculating gains most in total, then on to where the line to the next
    measured one (straight in log2 of the batch) crosses zero. 0: never; the highest batch: no crossing was
    measured.

    batch: [batches]; log_ratio: [rows, batches]; returns [rows].
    """
    rows = np.arange(len(log_ratio))
    total = np.hstack([np.zeros((len(log_ratio), 1)), np.cumsum(log_ratio, axis=1)])
    last = total.argmax(axis=1) - 1
    following = np.minimum(last + 1, len(batch) - 1)
    here, there = log_ratio[rows, last], log_ratio[rows, following]
    falls = (last >= 0) & (following > last)
    share = np.where(falls, here / np.where(falls, here - there, 1.0), 0.0)
    position = np.log2(batch)[last] + share * (np.log2(batch)[following] - np.log2(batch)[last])
    return np.where(last < 0, 0, np.floor(2**position + 1e-9)).astype(np.int64)


def measured_gains(results: pd.DataFrame) -> pd.DataFrame:
    """What each arm gained over the baseline on the whole grid of concurrencies, each counting alike.

    Columns: worker, arm_name, gain (ratio, 1.0 = as the baseline), low, high, n (blocks), worst (ratio at the
    concurrency where the arm does worst), worst_concurrency.
    """
    paired = paired_ratios(results)
    paired["log_ratio"] = np.log(paired["ratio"])
    grid = paired["concurrency"].nunique()
    records = []
    for (worker, arm), rows in paired.groupby(["worker", "arm_name"], sort=True):
        blocks = rows.groupby("repeat")["log_ratio"].agg(["mean", "count"])
        whole = ratio_interval(np.exp(blocks.loc[blocks["count"] == grid, "mean"].to_numpy(dtype=float)))
        by_concurrency = np.exp(rows.groupby("concurrency")["log_ratio"].mean())
        worst = by_concurrency.idxmin()
        records.append((worker, arm, whole.estimate, whole.low, whole.high, whole.n, by_concurrency[worst], worst))
    columns = ["worker", "arm_name", "gain", "low", "high", "n", "worst", "worst_concurrency"]
    return pd.DataFrame(records, columns=columns)


def _gain(results: pd.DataFrame, worker: str) -> _Gain | str:
    """The gains of `worker` by batch size, or why there are none."""
    paired = paired_ratios(results)
    paired = paired[(paired["worker"] == worker) & (paired["arm_name"] == "static")]
    if paired.empty:
        return "no block holds both a baseline and a static cell"
    logs = [(_batch(rows), np.log(rows["ratio"].to_numpy(dtype=float))) for _, rows in paired.groupby("concurrency")]
    logs.sort(key=lambda item: item[0])
    if min(len(values) for _, values in logs) < 2:
        return "a gain needs at least 2 repeats at every concurrency"
    counts = np.array([len(values) for _, values in logs], dtype=float)
    deviation = np.array([values.std(ddof=1) for _, values in logs])
    degrees = int((counts - 1).sum())
    # Few repeats make a cell's own deviation a guess: cells share theirs, and a noisier one keeps its own.
    shared = np.sqrt(((counts - 1) * deviation**2).sum() / degrees)
    return _Gain(
        batch=np.array([batch for batch, _ in logs], dtype=float),
        mean=np.array([values.mean() for _, values in logs]),
        error=np.maximum(deviation, shared) / np.sqrt(counts),
        degrees=degrees,
        repeats=int(counts.min()),
    )


def _batch(rows: pd.DataFrame) -> int:
    """The batch size a concurrency stands for: what the server ran at its peak, at most what was asked."""
    asked = int(rows["concurrency"].iloc[0])
    peak = rows["achieved_batch_peak"].dropna()
    return asked if peak.empty else min(asked, round(float(peak.median())))


def _p_above(gain: _Gain, margin: float) -> Array:
    """One-sided p-values of "the log ratio is not above `margin`"."""
    error = np.maximum(gain.error, 1e-12)
    return np.asarray(stdtr(gain.degrees, -(gain.mean - margin) / error), dtype=float)


def _crossover_interval(gain: _Gain) -> tuple[int, int]:
    """The middle 95 % of the crossover when the gains vary within their errors (parametric bootstrap)."""
    noise = np.random.default_rng(_SEED).standard_t(gain.degrees, size=(_DRAWS, len(gain.batch)))
    draws = gain.mean + noise * gain.error
    crossings = crossover(gain.batch, draws)
    low, high = np.quantile(crossings, [0.025, 0.975], method="closest_observation")
    return int(low), int(high)


def _ratio(gain: _Gain, index: int) -> str:
    half = t_quantile(gain.degrees) * gain.error[index]
    low, middle, high = np.exp(gain.mean[index] + np.array([-half, 0.0, half]))
    return f"{middle:.2f}x [{low:.2f}, {high:.2f}]"
