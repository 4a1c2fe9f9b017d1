"""Result tables whose right answer is known, for the statistics, the recommendation and the figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

CONCURRENCIES = (1, 2, 4, 8, 16, 32)


def crossing_at(batch: float, slope: float = 0.25) -> Callable[[int], float]:
    """Static / baseline, falling through 1.0 at `batch` by `slope` (log) for each doubling."""
    return lambda concurrency: float(np.exp(-slope * np.log2(concurrency / batch)))


def table(
    static_ratio: Callable[[int], float],
    *,
    noise: float = 0.03,
    drift: float = 0.2,
    repeats: int = 3,
    concurrencies: Sequence[int] = CONCURRENCIES,
    thresholds: Sequence[int] = (4, 16),
    workers: Sequence[str] = ("v1", "v2"),
    adaptive: Sequence[int | None] = (),
    off_cost: float = 0.0,
    seed: int = 0,
) -> pd.DataFrame:
    """A run's table. `noise`: sd of log tok/s of a cell; `drift`: sd of what a whole block shares (log).

    `adaptive`: thresholds of SGLang's own switch on worker v2, None: its default tiers, here as with 8.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for repeat in range(repeats):
        block = rng.normal(0, drift)
        for concurrency in concurrencies:
            plain = 40.0 * concurrency**0.85
            arms = [("none", "baseline", None, 1.0)]
            for worker in workers:
                arms.append((worker, "static", None, static_ratio(concurrency)))
                for threshold in thresholds:
                    speculates = concurrency <= threshold
                    ratio = static_ratio(concurrency) if speculates else 1.0 - off_cost
                    arms.append((worker, "dynamic", threshold, ratio))
            for tier in adaptive:
                arms.append(("v2", "adaptive", tier, static_ratio(concurrency) if concurrency <= (tier or 8) else 1.0))
            for order, (worker, arm, threshold, ratio) in enumerate(arms):
                tok_s = plain * ratio * np.exp(block + rng.normal(0, noise))
                rows.append(_row(worker, arm, threshold, concurrency, repeat, order, tok_s, rng))
    return pd.DataFrame(rows)


def _row(
    worker: str,
    arm: str,
    threshold: int | None,
    concurrency: int,
    repeat: int,
    order: int,
    tok_s: float,
    rng: np.random.Generator,
) -> dict[str, object]:
    limit = {"baseline": 0, "static": np.inf, "adaptive": threshold or 8}.get(arm, threshold)
    speculates = limit is not None and concurrency <= limit
    name = arm if threshold is None else f"{arm}-{threshold}"
    tpot_ms = 1000.0 * concurrency / tok_s
    return {
        "run_id": "synthetic",
        "cell_id": f"{worker}-{name}-c{concurrency}-r{repeat}",
        "profile": "cpu-tiny",
        "sglang": "0.5.12",
        "worker": worker,
        "arm": arm,
        "threshold": threshold,
        "concurrency": concurrency,
        "repeat": repeat,
        "order": order,
        "duration_s": 10.0,
        "output_tok_s": tok_s,
        "ttft_ms_p50": 3 * tpot_ms,
        "ttft_ms_p99": 5 * tpot_ms,
        "tpot_ms_p50": tpot_ms,
        "tpot_ms_p99": 1.5 * tpot_ms,
        "e2e_ms_p50": 70 * tpot_ms,
        "e2e_ms_p99": 80 * tpot_ms,
        "achieved_batch_mean": 0.95 * concurrency,
        "achieved_batch_peak": concurrency,
        "accept_length": 2.4 + rng.normal(0, 0.02) if speculates else None,
        "speculative_steps": 100 if speculates else 0,
        "plain_step_share": 0.0 if speculates else (1.0 if arm in ("dynamic", "adaptive") else None),
        "error": None,
        "machine": "test machine, 2 cores",
        "model": "tiny target",
        "draft_model": "tiny draft",
    }
