"""A load ramp on one server of a worker: concurrency up across the threshold and down again, step by step
traced.

OUT/ramp/ holds per worker <worker>.jsonl (the step trace of the ramp alone), <worker>-requests.csv and,
written last, <worker>.json (what ran).
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError
from tqdm.auto import tqdm

from specdec.plan import SweepPlan
from specdec.profile import locate, plan_server
from specdec.prompts import read_prompts
from specdec.ramp import Phase, ramp, warm_up
from specdec.results import machine, write_atomic
from specdec.server import Server
from specdec.step_trace import TRACE_VARIABLE, read_trace

FOLDER = "ramp"


class RampFacts(BaseModel):
    """What ran in a ramp, as the server said."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: str
    model: str
    sglang: str
    machine: str
    worker: str
    worker_class: str
    worker_file: str
    threshold: int
    concurrencies: tuple[int, ...]  # one phase each
    phase_s: float
    requests: int
    failed_requests: int
    switches_off: int
    switches_on: int


@dataclasses.dataclass(frozen=True)
class MeasuredRamp:
    """A ramp and its trace (`step_trace.read_trace`)."""

    facts: RampFacts
    trace: pd.DataFrame


def phases_across(threshold: int, peak: int) -> tuple[int, ...]:
    """Concurrencies from 1 over the threshold to `peak` and down again, twice.

    Raises ValueError unless 1 <= threshold < peak: the load must cross the threshold.
    """
    if not 1 <= threshold < peak:
        raise ValueError(
            f"a ramp to {peak} requests does not cross threshold {threshold}: it needs 1 <= threshold < peak"
        )
    up = sorted({1, threshold, min(2 * threshold, peak), peak})
    down = up[-2::-1]
    return (*up, *down, *up[1:], *down)


def measure_ramp(
    plan: SweepPlan,
    worker: str,
    out: str | Path,
    threshold: int,
    peak: int,
    phase_s: float,
    progress: Callable[..., Any] = tqdm,
) -> MeasuredRamp:
    """Start a server of `worker`, set the threshold, run the ramp, keep it in OUT/ramp; the server is
    stopped.

    `phase_s`: duration of each phase, s. Raises ValueError before anything starts, ServerDied or CellError if
    the server fails.
    """
    concurrencies = phases_across(threshold, peak)
    prompts = read_prompts(locate(plan.profile.prompts)).pick(256, "ramp")
    folder = Path(out) / FOLDER
    with (
        tempfile.TemporaryDirectory() as scratch,
        progress(total=3, desc=f"ramp {worker}", unit="part") as bar,
    ):
        trace_path = Path(scratch) / "trace.jsonl"
        server_plan = plan_server(plan.profile, "dynamic", worker, plan.sglang)
        env = {**server_plan.env, TRACE_VARIABLE: str(trace_path)}
        server_plan = dataclasses.replace(server_plan, env=env)
        with Server.start(server_plan, Path(out) / "logs", plan.profile.start_timeout_s) as server:
            bar.update(1)
            server.set_threshold(threshold)
            warm_up(server, (peak, 1), prompts)  # in this order it ends speculating, as the ramp begins
            bar.update(1)
            begin = trace_path.stat().st_size
            before = server.state() or {}
            phases = [Phase(concurrency, duration_s=phase_s) for concurrency in concurrencies]
            requests = ramp(server, phases, prompts, plan.output_tokens).requests
            after = server.state() or {}
        facts = RampFacts(
            profile=plan.profile.name,
            model=plan.profile.model,
            sglang=plan.sglang,
            machine=machine(),
            worker=worker,
            worker_class=after["worker_class"],
            worker_file=after["worker_file"],
            threshold=threshold,
            concurrencies=concurrencies,
            phase_s=phase_s,
            requests=len(requests),
            failed_requests=int(requests["error"].notna().sum()),
            switches_off=after["switches_off"] - before["switches_off"],
            switches_on=after["switches_on"] - before["switches_on"],
        )
        write_atomic(folder / f"{worker}.jsonl", trace_path.read_bytes()[begin:])
        write_atomic(folder / f"{worker}-requests.csv", requests.to_csv(index=False).encode())
        write_atomic(folder / f"{worker}.json", (facts.model_dump_json(indent=1) + "\n").encode())
        bar.update(1)
    return read_ramp(out, worker)


def measure_ramps(plan: SweepPlan, out: str | Path, threshold: int, peak: int, phase_s: float) -> list[MeasuredRamp]:
    """`measure_ramp` on each worker of the plan, one server after the other."""
    return [measure_ramp(plan, worker, out, threshold, peak, phase_s) for worker in plan.workers]


def read_ramp(out: str | Path, worker: str) -> MeasuredRamp:
    """The ramp of a worker. Raises ValueError in one line if the folder holds none that is whole."""
    path = Path(out) / FOLDER / f"{worker}.json"
    try:
        facts = RampFacts.model_validate_json(path.read_bytes())
        return MeasuredRamp(facts, read_trace(path.with_suffix(".jsonl")))
    except OSError:
        raise ValueError(f"{out} holds no ramp of worker {worker}") from None
    except ValidationError as error:
        raise ValueError(f"{path}: {error.errors()[0]['msg']}") from None


def read_ramps(out: str | Path) -> list[MeasuredRamp]:
    """The ramps of a run folder, by worker; none if notebook 03 has not run."""
    return [read_ramp(out, path.stem) for path in sorted((Path(out) / FOLDER).glob("*.json"))]


def ramp_table(ramps: Iterable[MeasuredRamp]) -> pd.DataFrame:
    """What ran in each ramp."""
    columns = list(RampFacts.model_fields)
    return pd.DataFrame([ramp.facts.model_dump() for ramp in ramps], columns=columns).set_index("worker").T
