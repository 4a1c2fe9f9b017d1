"""A load on one server of a worker, at one threshold, step by step traced: a ramp, or another shape of load/shapes.py.

OUT/ramp/ holds per worker <name>.jsonl (the step trace of the load alone), <name>-requests.csv and, written last,
<name>.json (what ran). The name is the worker's, for another load than the ramp with the load's behind it:
"v2", "v2-poisson-4".
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError
from tqdm.auto import tqdm

from specdec.load.closed_loop import Phase, ramp, warm_up
from specdec.load.loop_thread import CellError
from specdec.load.open_loop import open_loop
from specdec.load.open_loop_facts import OpenLoopFacts, open_loop_facts
from specdec.load.prompts import Prompt, PromptSet, cut_prompts, read_prompts
from specdec.load.request_stream import Request
from specdec.load.shapes import ClosedLoad, Load, OpenLoad, Size
from specdec.runs.plan import SweepPlan
from specdec.runs.results import machine, write_atomic
from specdec.runs.step_trace import read_trace
from specdec.runs.traced import traced_server
from specdec.servers.profile import locate
from specdec.servers.server import Server

FOLDER = "ramp"
MOST_PROMPTS = 256  # of the prompt set, which can be large


class RampFacts(BaseModel):
    """What ran in a ramp or another load, as the server said. Fields with a default are missing in older files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: str
    model: str
    sglang: str
    machine: str
    worker: str
    worker_class: str
    worker_file: str
    threshold: int
    load: str = "ramp"  # a text of load/shapes.py
    seed: int | None = None
    prompt_set: str | None = None
    prompt_set_sha256: str | None = None
    trace_sha256: str | None = None  # of a replayed trace file
    input_tokens: str | None = None  # a text of lengths; None: prompts as they stand in their file, or a trace's
    output_tokens: str | None = None  # a text of lengths; None: a trace's
    concurrencies: tuple[int, ...] = ()  # one phase each; none in an open loop
    phase_s: float | None = None  # None in an open loop
    requests: int
    failed_requests: int
    switches_off: int
    switches_on: int
    open_loop: OpenLoopFacts | None = None

    @property
    def name(self) -> str:
        """Of its files and figures, unique within a run folder."""
        return self.worker if self.load == "ramp" else re.sub(r"[^A-Za-z0-9.]+", "-", f"{self.worker}-{self.load}")


@dataclasses.dataclass(frozen=True)
class MeasuredRamp:
    """A ramp, its trace (`step_trace.read_trace`) and its requests (`request_stream.Ramp`)."""

    facts: RampFacts
    trace: pd.DataFrame
    requests: pd.DataFrame


def measure_ramp(
    plan: SweepPlan,
    worker: str,
    out: str | Path,
    threshold: int,
    load: Load,
    progress: Callable[..., Any] = tqdm,
) -> MeasuredRamp:
    """Start a server of `worker`, set the threshold, run the load, keep it in OUT/ramp; the server is stopped.

    Raises ValueError before anything starts, ServerDied or CellError if the server fails.
    """
    prompt_set = read_prompts(locate(plan.profile.prompts))
    prompts = prompt_set.pick(min(MOST_PROMPTS, len(prompt_set.prompts)), f"ramp-{plan.seed}")
    with (
        progress(total=3, desc=f"{load.text} {worker}", unit="part") as bar,
        traced_server(plan, worker, out) as (server, trace_path),
    ):
        bar.update(1)
        server.set_threshold(threshold)
        peak = max(load.concurrencies) if isinstance(load, ClosedLoad) else threshold + 1
        warm_up(server, (peak, 1), prompts)  # in this order it ends speculating, as the load begins
        server.flush_cache()  # else the prompts of the warm-up would be answered from it
        bar.update(1)
        begin = trace_path.stat().st_size
        before = server.state() or {}
        requests = _run(server, load, prompts)
        after = server.state() or {}
        server.stop()
        if requests["error"].notna().all():
            raise CellError(f"no request of {load.text} was answered: {requests['error'].iloc[0]}")
        facts = RampFacts(
            **_asked(plan, load, prompt_set),
            worker=worker,
            worker_class=after["worker_class"],
            worker_file=after["worker_file"],
            threshold=threshold,
            requests=len(requests),
            failed_requests=int(requests["error"].notna().sum()),
            switches_off=after["switches_off"] - before["switches_off"],
            switches_on=after["switches_on"] - before["switches_on"],
            open_loop=open_loop_facts(load, requests, plan.slo) if isinstance(load, OpenLoad) else None,
        )
        path = Path(out) / FOLDER / facts.name
        write_atomic(Path(f"{path}.jsonl"), trace_path.read_bytes()[begin:])
        write_atomic(Path(f"{path}-requests.csv"), requests.to_csv(index=False).encode())
        write_atomic(Path(f"{path}.json"), (facts.model_dump_json(indent=1) + "\n").encode())
        bar.update(1)
    return read_ramp(out, facts.name)


def _run(server: Server, load: Load, prompts: Sequence[Prompt]) -> pd.DataFrame:
    """Put the load on the server; its requests."""
    requests = requests_of(server, prompts, load.sizes)
    if isinstance(load, OpenLoad):
        return open_loop(server, zip(load.due_s, requests, strict=True)).requests
    phases = [Phase(concurrency, duration_s=load.phase_s) for concurrency in load.concurrencies]
    return ramp(server, phases, list(requests)).requests


def requests_of(server: Server, prompts: Sequence[Prompt], sizes: Sequence[Size]) -> Iterator[Request]:
    """A request of each size. Prompts of a given length are cut from the running text of `prompts`.

    The server tokenizes that text, without special tokens. A set shorter than the prompts repeats itself in them,
    which a draft predicts more easily. Raises ConnectionError if the server does not tokenize.
    """
    lengths = [size.input_tokens for size in sizes if size.input_tokens is not None]
    chosen = cut_prompts(_tokens(server, prompts), lengths) if lengths else itertools.cycle(prompts)
    return (Request(prompt, size.output_tokens) for size, prompt in zip(sizes, chosen, strict=False))


def _tokens(server: Server, prompts: Sequence[Prompt]) -> list[int]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    body = {"prompt": texts, "add_special_tokens": False}
    of_texts = iter(server.post("/tokenize", body)["tokens"] if texts else [])
    return [token for prompt in prompts for token in (next(of_texts) if isinstance(prompt, str) else prompt)]


def _asked(plan: SweepPlan, load: Load, prompt_set: PromptSet) -> dict[str, Any]:
    """What was asked for, as fields of RampFacts."""
    lengths = load.lengths
    return {
        "profile": plan.profile.name,
        "model": plan.profile.model,
        "sglang": plan.sglang,
        "machine": machine(),
        "load": load.text,
        "seed": plan.seed,
        "prompt_set": prompt_set.name,
        "prompt_set_sha256": prompt_set.sha256,
        "trace_sha256": load.trace_sha256 if isinstance(load, OpenLoad) else None,
        "input_tokens": lengths.input.text if lengths and lengths.input else None,
        "output_tokens": lengths.output.text if lengths else None,
        "concurrencies": load.concurrencies if isinstance(load, ClosedLoad) else (),
        "phase_s": load.phase_s if isinstance(load, ClosedLoad) else None,
    }


def measure_ramps(plan: SweepPlan, out: str | Path, threshold: int, load: Load) -> list[MeasuredRamp]:
    """`measure_ramp` on each worker of the plan, one server after the other."""
    return [measure_ramp(plan, worker, out, threshold, load) for worker in plan.workers]


def read_ramp(out: str | Path, name: str) -> MeasuredRamp:
    """A ramp by `RampFacts.name`. Raises ValueError in one line if the folder holds none that is whole."""
    path = Path(out) / FOLDER / f"{name}.json"
    try:
        facts = RampFacts.model_validate_json(path.read_bytes())
        requests = pd.read_csv(path.with_name(f"{name}-requests.csv"))
        return MeasuredRamp(facts, read_trace(path.with_suffix(".jsonl")), requests)
    except OSError:
        raise ValueError(f"{out} holds no ramp {name}") from None
    except ValidationError as error:
        raise ValueError(f"{path}: {error.errors()[0]['msg']}") from None


def read_ramps(out: str | Path) -> list[MeasuredRamp]:
    """The ramps of a run folder, by name; none if notebook 03 has not run."""
    return [read_ramp(out, name) for name in sorted(path.stem for path in (Path(out) / FOLDER).glob("*.json"))]


def ramp_table(ramps: Iterable[MeasuredRamp]) -> pd.DataFrame:
    """What ran in each ramp, and of open loops what they gave; numbers to four digits."""
    columns = {ramp.facts.name: _column(ramp.facts) for ramp in ramps}
    rows = [*RampFacts.model_fields, *OpenLoopFacts.model_fields]
    table = pd.DataFrame(columns, index=rows, dtype=object).dropna(how="all")
    return table.rename_axis(columns="worker").fillna("")


def _column(facts: RampFacts) -> dict[str, Any]:
    """The facts that there are."""
    fields = facts.model_dump(exclude={"worker", "open_loop"})
    if facts.open_loop is not None:
        fields |= facts.open_loop.model_dump()
    known = {name: value for name, value in fields.items() if value not in (None, ())}
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in known.items()}
