"""Step costs as a run of notebook 03 would keep them, for the figures."""

from __future__ import annotations

from specdec.runs.step_cost import Spread, StepCost, WorkerStepCosts

BATCHES = (1, 8, 32)


def spread(ms: float) -> Spread:
    return Spread(p25_ms=0.97 * ms, p50_ms=ms, p75_ms=1.05 * ms)


def costs() -> list[WorkerStepCosts]:
    """The baseline, v1 (a tree) and v2 (a chain)."""
    return [_worker("none", 1.0, None), _worker("v1", 5.0, 3.0), _worker("v2", 1.8, 2.3)]


def _worker(worker: str, verify_grows: float, accept: float | None) -> WorkerStepCosts:
    found: list[StepCost] = []
    for batch in BATCHES:
        forward = 16.0 + 0.9 * batch
        if accept is None:
            found.append(_baseline(batch, forward))
            continue
        found.append(_step(batch, "speculative", 4 + 0.2 * batch, forward * (1 + 0.2 * verify_grows), accept))
        found.append(_step(batch, "plain", 0.1, 1.05 * forward, 1.0))
    shape = {} if accept is None else {"topk": 4 if worker == "v1" else 1, "num_draft_tokens": 16}
    return WorkerStepCosts(
        profile="cpu-tiny",
        model="tiny target",
        device="cpu",
        sglang="0.5.12",
        machine="test machine, 2 cores",
        worker=worker,
        worker_class=None if accept is None else "EAGLEWorker",
        output_tokens_per_request=64,
        batches=BATCHES,
        costs=tuple(found),
        **shape,
    )


def _baseline(batch: int, forward: float) -> StepCost:
    return StepCost(
        batch_size=batch,
        mode="baseline",
        steps=60,
        accept_length=1.0,
        total=spread(forward + 2),
        forward=spread(forward),
        rest=spread(2),
    )


def _step(batch: int, mode: str, draft: float, verify: float, accept: float) -> StepCost:
    return StepCost(
        batch_size=batch,
        mode=mode,  # type: ignore[arg-type]
        steps=31,
        accept_length=accept,
        total=spread(draft + verify + 2 + 3.5),  # medians do not add up
        draft=spread(draft),
        verify=spread(verify),
        draft_extend=spread(2),
        rest=spread(3),
    )
