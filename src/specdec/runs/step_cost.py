"""What a decode step costs: speculative and plain ones, and those of the baseline, at fixed batch sizes.

Waves of exactly `batch` requests are sent at once to a traced server, and its steps of exactly that batch size
are kept. Within a wave no prefill comes between two of them. OUT/step_cost/<worker>.json holds one worker each.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError
from tqdm.auto import tqdm

from specdec.load.closed_loop import Phase, ramp, warm_up
from specdec.load.loop_thread import CellError
from specdec.load.prompts import read_prompts
from specdec.load.request_stream import Request
from specdec.runs.plan import ARM_NONE, SweepPlan
from specdec.runs.results import machine, write_atomic
from specdec.runs.step_trace import LIVE, STAGE_COLUMNS, STAGES, read_trace
from specdec.runs.traced import traced_server
from specdec.servers.profile import locate
from specdec.servers.server import Server

FOLDER = "step_cost"
LEAST_STEPS = 30  # of a batch size and mode
LEAST_WAVES = 3  # of them, in turns with the other modes: noise that lasts a while must not hit one alone
_log = logging.getLogger(__name__)
_WAVE_BEGINS_S = 0.05  # all requests of a wave are sent within it, and none after it
_THRESHOLDS: dict[str, int | None] = {"speculative": None, "plain": 0}

_PARTS = (*STAGES, "forward", "rest", "total")

Mode = Literal["speculative", "plain", "baseline"]


class Spread(BaseModel):
    """Median and quartiles over the steps, ms."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    p25_ms: float
    p50_ms: float
    p75_ms: float


class StepCost(BaseModel):
    """The steps of one batch size and mode. A baseline's step has no stages, the others' no `forward`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: int
    mode: Mode
    steps: int
    accept_length: float  # tokens per step and request
    total: Spread  # from the start of a step to that of the next one
    draft: Spread | None = None
    verify: Spread | None = None
    draft_extend: Spread | None = None
    forward: Spread | None = None  # the whole run of the batch
    rest: Spread  # total without the parts above: sampling, scheduling, and on a GPU what the host waits for


class Asked(BaseModel):
    """What is measured on one worker ("none": the baseline), and where."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: str
    model: str
    device: str  # "cuda": a stage's time is that of its launch
    sglang: str
    machine: str
    worker: str
    topk: int | None = None
    num_draft_tokens: int | None = None
    output_tokens_per_request: int
    batches: tuple[int, ...]


class WorkerStepCosts(Asked):
    """What it gave; a batch size that the server did not run is missing. The times are the host's."""

    worker_class: str | None
    costs: tuple[StepCost, ...]


@dataclass
class _TracedWorker:
    """A server, its trace, and the steps found in it so far, by batch size and mode."""

    worker: str
    server: Server
    trace: Path
    steps: dict[tuple[int, str], list[pd.DataFrame]] = field(default_factory=dict)
    given_up: set[tuple[int, str]] = field(default_factory=set)

    @property
    def modes(self) -> tuple[Mode, ...]:
        return ("baseline",) if self.worker == ARM_NONE else ("speculative", "plain")

    def set_mode(self, mode: str) -> None:
        if mode in _THRESHOLDS:
            self.server.set_threshold(_THRESHOLDS[mode])

    def warm_up(self, batch: int, requests: Sequence[Request]) -> None:
        """Short requests in each mode."""
        for mode in self.modes:
            self.set_mode(mode)
            warm_up(self.server, [batch, 1], [request.prompt for request in requests])

    def lacks(self, batch: int, mode: str) -> bool:
        """Whether there are too few steps of this batch size and mode, and more can be had."""
        if (batch, mode) in self.given_up:
            return False
        waves = self.steps.get((batch, mode), [])
        return len(waves) < LEAST_WAVES or sum(map(len, waves)) < LEAST_STEPS

    def wave(self, batch: int, mode: str, requests: Sequence[Request]) -> None:
        """`batch` requests at once, to their end; keeps the steps in which all of them were in the batch.

        Raises CellError if one fails. Where there was no such step more waves would not change that: a warning
        says so.
        """
        self.set_mode(mode)
        begin = self.trace.stat().st_size
        sent = ramp(self.server, [Phase(batch, duration_s=_WAVE_BEGINS_S)], requests, sample_s=None).requests
        for error in sent["error"].dropna():
            raise CellError(f"worker {self.worker}, batch size {batch}: {error}")
        steps = full_steps(read_trace(self.trace, begin), batch, mode)
        if steps.empty:
            self.given_up.add((batch, mode))
            _log.warning(
                "worker %s: %d requests of %d tokens sent at once gave no two %s steps of batch size %d: the server "
                "admits fewer at once, or they are too short",
                *(self.worker, batch, requests[0].output_tokens, mode, batch),
            )
            return
        self.steps.setdefault((batch, mode), []).append(steps)


def batches_up_to(peak: int) -> tuple[int, ...]:
    """1, 8 and 32 as far as they are below `peak` (requests), and `peak`."""
    return (*(batch for batch in (1, 8, 32) if batch < peak), peak)


def full_steps(trace: pd.DataFrame, batch: int, mode: str) -> pd.DataFrame:
    """The steps of a wave with exactly this batch size and mode, with their `total_us`: to the start of the next.

    The last one has no next one of its kind and is left out. mode "baseline": that of steps without any.
    """
    modes = trace["mode"].fillna("baseline")
    alike = (trace["batch_size"] == batch) & (modes == mode)
    followed = alike & alike.shift(-1, fill_value=False) & (trace["step"].shift(-1) == trace["step"] + 1)
    total_us = (trace["t_s"].shift(-1) - trace["t_s"]) * 1e6
    return trace.assign(total_us=total_us)[followed]


def cost_of(steps: pd.DataFrame, batch: int, mode: Mode) -> StepCost:
    """Medians and quartiles of such steps (one or more)."""
    parts = {"forward": "duration_us"} if mode == "baseline" else STAGE_COLUMNS
    live = steps[LIVE].sum()
    return StepCost(
        batch_size=batch,
        mode=mode,
        steps=len(steps),
        accept_length=float(steps["tokens"].sum() / live),
        total=_spread(steps["total_us"]),
        rest=_spread(steps["total_us"] - steps[list(parts.values())].sum(axis=1)),
        **{name: _spread(steps[column]) for name, column in parts.items()},
    )


def _spread(us: pd.Series[float]) -> Spread:
    low, middle, high = (round(float(value) / 1000, 3) for value in np.quantile(us, [0.25, 0.5, 0.75]))
    return Spread(p25_ms=low, p50_ms=middle, p75_ms=high)


def measure_step_costs(
    plan: SweepPlan,
    out: str | Path,
    batches: Sequence[int],
    progress: Callable[..., Any] = tqdm,
) -> list[WorkerStepCosts]:
    """Measure the baseline and each worker of the plan at these batch sizes; kept in OUT/step_cost.

    What lies there already is not measured again. A batch size that a server does not run is left out, with a
    warning. Where servers can stand side by side they take turns, wave by wave, so that a machine that drifts does not
    decide; else they follow each other. Raises ValueError before anything starts, ServerDied or CellError if a
    server fails.
    """
    if not batches or min(batches) < 1 or len(set(batches)) < len(batches):
        raise ValueError(f"batches must be different integers of 1 or more, got {batches}")
    prompts = read_prompts(locate(plan.profile.prompts)).pick(max(batches), "step-cost")
    requests = [Request(prompt, plan.output_tokens) for prompt in prompts]
    asked = {worker: _asked(plan, worker, batches) for worker in (ARM_NONE, *plan.workers)}
    workers = [worker for worker, what in asked.items() if not _is_done(out, what)]
    groups = ([workers] if workers else []) if plan.profile.side_by_side else [[worker] for worker in workers]
    for group in groups:
        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(progress(total=len(group) + len(batches), desc="step cost", unit="part"))
            traced = []
            for worker in group:
                traced.append(_TracedWorker(worker, *stack.enter_context(traced_server(plan, worker, out))))
                traced[-1].warm_up(max(batches), requests)
                bar.update(1)
            for batch in batches:
                _measure_batch(traced, batch, requests)
                bar.update(1)
            for one in traced:
                _write(asked[one.worker], one, out)
    return read_step_costs(out)


def _measure_batch(traced: Sequence[_TracedWorker], batch: int, requests: Sequence[Request]) -> None:
    """Waves in turn until every server and mode has enough steps."""
    lacking = True
    while lacking:
        lacking = False
        for one in traced:
            for mode in one.modes:
                if one.lacks(batch, mode):
                    one.wave(batch, mode, requests[:batch])
                    lacking = True


def _asked(plan: SweepPlan, worker: str, batches: Iterable[int]) -> Asked:
    draft = None if worker == ARM_NONE else plan.profile.worker(worker, plan.sglang)
    return Asked(
        profile=plan.profile.name,
        model=plan.profile.model,
        device=plan.profile.device,
        sglang=plan.sglang,
        machine=machine(),
        worker=worker,
        topk=None if draft is None else draft.topk,
        num_draft_tokens=None if draft is None else draft.num_draft_tokens,
        output_tokens_per_request=plan.output_tokens,
        batches=tuple(sorted(batches)),
    )


def _is_done(out: str | Path, asked: Asked) -> bool:
    """Whether the folder holds just this; a file that cannot be read does not."""
    try:
        found = _read(_path(out, asked.worker))
    except (OSError, ValidationError):
        return False
    return Asked(**found.model_dump(include=set(Asked.model_fields))) == asked


def _write(asked: Asked, traced: _TracedWorker, out: str | Path) -> None:
    costs = [
        cost_of(pd.concat(traced.steps[batch, mode]), batch, mode)
        for batch in asked.batches
        for mode in traced.modes
        if (batch, mode) in traced.steps
    ]
    state = traced.server.state() or {}
    found = WorkerStepCosts(**asked.model_dump(), worker_class=state.get("worker_class"), costs=tuple(costs))
    write_atomic(_path(out, asked.worker), (found.model_dump_json(indent=1) + "\n").encode())


def _path(out: str | Path, worker: str) -> Path:
    return Path(out) / FOLDER / f"{worker}.json"


def _read(path: Path) -> WorkerStepCosts:
    return WorkerStepCosts.model_validate_json(path.read_bytes())


def read_step_costs(out: str | Path) -> list[WorkerStepCosts]:
    """The step costs of a run folder, the baseline first, then by worker; none if they were not measured.

    Raises ValueError in one line for a file that holds none.
    """
    found = []
    for path in sorted((Path(out) / FOLDER).glob("*.json"), key=lambda path: (path.stem != ARM_NONE, path.stem)):
        try:
            found.append(_read(path))
        except ValidationError as error:
            raise ValueError(f"{path}: {error.errors()[0]['msg']}") from None
    return found


def step_cost_table(costs: Iterable[WorkerStepCosts]) -> pd.DataFrame:
    """Per worker, batch size and mode: number of steps, median ms of each part, accept length, ms per token."""
    rows = [
        {
            "worker": worker.worker,
            "batch size": cost.batch_size,
            "step": cost.mode,
            "steps": cost.steps,
            **{f"{part.replace('_', ' ')} ms": _median_ms(getattr(cost, part)) for part in _PARTS},
            "total ms, quartiles": f"{cost.total.p25_ms:.1f} to {cost.total.p75_ms:.1f}",
            "accept length": round(cost.accept_length, 2),
            "ms per token and request": round(ms_per_token(cost), 2),
        }
        for worker in costs
        for cost in worker.costs
    ]
    columns = ["worker", "batch size", "step", "steps", *(f"{part.replace('_', ' ')} ms" for part in _PARTS)]
    return pd.DataFrame(rows, columns=[*columns, "total ms, quartiles", "accept length", "ms per token and request"])


def _median_ms(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.p50_ms:.1f}"


def ms_per_token(cost: StepCost) -> float:
    """What a request waits for a token, ms: the median step over the accept length."""
    return cost.total.p50_ms / cost.accept_length
