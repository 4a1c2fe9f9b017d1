"""Measure a plan: start servers, run cell after cell, keep each row when it is done, go on after anything.

OUT/ holds plan.json (written first), cells/ (one file per row), results.parquet and results.csv, logs/
(servers), status.json (what is going on, for another terminal) and lock. Kill the run at any point: the same
call goes on with the cells that are not there yet.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import ValidationError
from tqdm.auto import tqdm

from specdec.analysis.stats import mean_interval
from specdec.load.bench import bench_module
from specdec.load.cell import run_cell
from specdec.load.loop_thread import DEFAULT_STALL_S
from specdec.load.prompts import PromptSet, read_prompts
from specdec.runs.arm_servers import ArmServers, describe
from specdec.runs.plan import ARM_NONE, Arm, PlannedCell, SweepPlan
from specdec.runs.results import (
    Cell,
    broken_invariants,
    git_commit,
    machine,
    read_cells,
    write_atomic,
    write_cell,
    write_tables,
)
from specdec.runs.run_folder import Status, folder_lock, open_folder, utc_now
from specdec.servers.profile import locate
from specdec.worker_path import installed_release

_log = logging.getLogger(__name__)


def run_sweep(
    plan: SweepPlan,
    out: str | Path,
    progress: Callable[..., Any] = tqdm,
    retry_failed: bool = False,
    stall_s: float = DEFAULT_STALL_S,
) -> pd.DataFrame:
    """Measure the cells of `plan` that are not yet in `out`; the table of all its rows.

    A cell that fails is a row with its error; with `retry_failed` those of an earlier call are measured anew.
    `progress` is called like tqdm. Raises ValueError before anything starts: another plan in `out`, another
    run at work there, another release in this environment, a prompt file that has changed. Ctrl-C ends the
    servers and keeps the rows.
    """
    prompts = check_inputs(plan)
    with open_run(plan, Path(out), retry_failed) as run:
        servers = ArmServers(plan, run.out / "logs", prompts, run.restarts(), run.note_start)
        with contextlib.closing(servers):
            _measure_all(run, CellMeasurer(plan, run.run_id, prompts, servers, stall_s), progress)
    return run.table


def check_inputs(plan: SweepPlan) -> PromptSet:
    """The prompts of `plan`. Raises ValueError if this environment or the prompt file is not the planned one."""
    if (installed := installed_release()) != plan.sglang:
        raise ValueError(f"the plan is for SGLang {plan.sglang}, this environment has {installed}")
    prompts = read_prompts(locate(plan.profile.prompts))
    if prompts.sha256 != plan.prompt_set_sha256:
        raise ValueError(f"the prompt file {plan.profile.prompts} is not the one that was planned with")
    return prompts


@dataclass
class Run:
    """A run at work: its rows and its status. Written by the one process that holds the folder."""

    plan: SweepPlan
    out: Path
    run_id: str
    rows: dict[str, Cell] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)
    measured: int = 0  # cells of this call
    total: int = 0
    current: str | None = None  # cell at work
    starting: str | None = None  # server
    last_result: str | None = None
    started_at: str = field(default_factory=utc_now)
    table: pd.DataFrame = field(default_factory=pd.DataFrame)  # of all rows, once the run has ended

    def take_done(self, rows: list[Cell], retry_failed: bool) -> None:
        """Count the rows of an earlier call as done."""
        self.rows = {row.cell_id: row for row in rows if row.error is None or not retry_failed}

    def restarts(self) -> Counter[str]:
        """By server: how often it was started again after a failure, earlier calls included."""
        restarts: Counter[str] = Counter()
        for row in self.rows.values():
            server = Arm(row.arm, row.worker, row.threshold).server
            restarts[server] = max(restarts[server], row.server_restarts)
        return restarts

    def missing(self) -> list[PlannedCell]:
        """The cells of the plan's `repeats` that have no row, in the plan's order."""
        planned = [cell for repeat in range(self.plan.repeats) for cell in self.plan.cells(repeat)]
        self.total = len(planned)
        return [cell for cell in planned if cell.cell_id not in self.rows]

    def bar(self, progress: Callable[..., Any], missing: int) -> Any:
        """A progress bar like tqdm's over all cells, of which `missing` are still to be measured."""
        desc = f"sweep {self.plan.profile.name}"
        return progress(total=self.total, initial=self.total - missing, unit="cell", desc=desc)

    def keep(self, row: Cell) -> None:
        """Write a row that has just been measured."""
        write_cell(self.out, row)
        self.rows[row.cell_id] = row
        self.measured += 1
        result = f"failed: {row.error}" if row.error else f"{row.output_tok_s:.1f} tok/s"
        self.last_result = f"{row.cell_id} {result}"
        if row.error:
            _log.warning("cell %s failed: %s", row.cell_id, row.error)

    def note_start(self, server: str | None) -> None:
        """Say which server is starting; None when it has."""
        self.starting = server
        self.note("running")

    def note(self, state: str) -> None:
        """Write status.json. A full disk does not matter here: the next row will say so."""
        left = self.total - len(self.rows)
        each_s = (time.monotonic() - self.began_s) / self.measured if self.measured else None
        status = Status(
            run_id=self.run_id,
            pid=os.getpid(),
            state=state,
            cells_total=self.total,
            cells_done=len(self.rows),
            cells_failed=sum(row.error is not None for row in self.rows.values()),
            now=self.current if self.starting is None else f"starting server {self.starting}",
            last_result=self.last_result,
            seconds_left=None if each_s is None else left * each_s,
            started_at=self.started_at,
            updated_at=utc_now(),
        )
        with contextlib.suppress(OSError):
            write_atomic(self.out / "status.json", (status.model_dump_json(indent=1) + "\n").encode())


@contextlib.contextmanager
def open_run(plan: SweepPlan, out: Path, retry_failed: bool) -> Iterator[Run]:
    """Hold the folder of a run, with the rows of earlier calls; at the end, however it comes, write its tables.

    Raises ValueError for another plan in `out` and for another run at work there.
    """
    with folder_lock(out):
        run = Run(plan, out, open_folder(out, plan))
        run.take_done(read_cells(out), retry_failed)
        try:
            yield run
        except KeyboardInterrupt:
            run.note("interrupted")
            raise
        except BaseException:
            run.note("failed")
            raise
        finally:
            run.table = write_tables(out, read_cells(out))
        run.note("done")


@dataclass
class CellMeasurer:
    """Measures cells with servers of this machine."""

    plan: SweepPlan
    run_id: str
    prompts: PromptSet
    servers: ArmServers
    stall_s: float
    machine: str = field(default_factory=machine)
    git_commit: str | None = field(default_factory=git_commit)

    def measure(self, planned: PlannedCell) -> Cell:
        """Measure one cell; what goes wrong is in the row, and the next cell then gets a new server."""
        arm, plan = planned.arm, self.plan
        columns = asked_columns(plan, self.run_id, planned)
        columns |= {"machine": self.machine, "git_commit": self.git_commit}
        try:
            server = self.servers.ready(arm)
            columns |= describe(server) | {"started_at": utc_now()}
            prompts = plan.prompts(self.prompts, planned)
            measured = run_cell(server, prompts, planned.concurrency, plan.output_tokens, plan.slo, self.stall_s)
            columns |= asdict(measured)
            self.servers.succeeded(arm)
        except Exception as error:
            columns["error"], columns["error_log_tail"] = self.servers.failed(arm, error)
        columns["server_restarts"] = self.servers.restarts[arm.server]
        return _checked(columns)


def asked_columns(plan: SweepPlan, run_id: str, planned: PlannedCell) -> dict[str, Any]:
    """What is known of a cell before it is measured, and wherever that is."""
    arm, profile = planned.arm, plan.profile
    return {
        "run_id": run_id,
        "cell_id": planned.cell_id,
        "started_at": utc_now(),
        "profile": profile.name,
        **{"arm": arm.arm, "worker": arm.worker, "threshold": arm.threshold},
        **{"concurrency": planned.concurrency, "repeat": planned.repeat, "order": planned.order},
        "num_prompts": plan.num_prompts(planned.concurrency),
        "output_tokens_per_request": plan.output_tokens,
        **{"prompt_set": plan.prompt_set, "prompt_set_sha256": plan.prompt_set_sha256},
        **{"slo_ttft_ms": plan.slo_ttft_ms, "slo_tpot_ms": plan.slo_tpot_ms},
        "model": profile.model,
        "draft_model": None if arm.worker == ARM_NONE else profile.draft_model,
    }


def import_bench_meanwhile() -> None:
    """Begin to import the load client: that takes as long as a server's start, so both go on at once."""
    threading.Thread(target=bench_module, daemon=True).start()


def _measure_all(run: Run, measurer: CellMeasurer, progress: Callable[..., Any]) -> None:
    missing = run.missing()
    if missing:
        import_bench_meanwhile()
        run.note("running")
        measurer.servers.start_all(cell.arm for cell in missing)
        run.began_s = time.monotonic()  # a cell's share of the servers' start says nothing about the next cell
    with run.bar(progress, len(missing)) as bar:
        for repeat in range(run.plan.max_repeats):
            cells = _cells_of(run, repeat)
            if repeat >= run.plan.repeats:
                run.total += len(cells)
                bar.total = run.total
                bar.update(sum(cell.cell_id in run.rows for cell in cells))
            for cell in cells:
                if cell.cell_id not in run.rows:
                    _measure_one(run, measurer, cell)
                    bar.set_postfix_str(run.last_result, refresh=False)
                    bar.update(1)


def _measure_one(run: Run, measurer: CellMeasurer, planned: PlannedCell) -> None:
    run.current = planned.cell_id
    run.note("running")
    run.keep(measurer.measure(planned))
    run.current = None
    run.note("running")


def _cells_of(run: Run, repeat: int) -> list[PlannedCell]:
    """The cells of a repeat; beyond the plan's `repeats` only where the numbers are not sure enough."""
    plan = run.plan
    if repeat < plan.repeats:
        return plan.cells(repeat)
    return plan.cells(repeat, [c for c in plan.concurrencies if not _is_sure(run, c, repeat)])


def _is_sure(run: Run, concurrency: int, repeats: int) -> bool:
    """Whether every arm's interval at this concurrency, over the first `repeats`, is within target_ci."""
    target_ci = run.plan.target_ci
    assert target_ci is not None  # else max_repeats is repeats
    for arm in run.plan.arms():
        values = [
            row.output_tok_s
            for row in run.rows.values()
            if (row.arm, row.worker, row.threshold, row.concurrency)
            == (arm.arm, arm.worker, arm.threshold, concurrency)
            and row.repeat < repeats
            and row.error is None
            and row.output_tok_s is not None
        ]
        interval = mean_interval(values)
        if not interval.known or interval.high - interval.estimate > target_ci * interval.estimate:
            return False
    return True


def _checked(columns: dict[str, Any]) -> Cell:
    """The row; one that breaks an invariant of the schema gets that as its error."""
    try:
        return Cell(**columns)
    except ValidationError:
        broken = broken_invariants(Cell.model_construct(**columns))
        if not broken:
            raise
        return Cell(**columns | {"error": "; ".join(broken)})
