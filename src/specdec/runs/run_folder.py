"""The folder of a run: who may write into it, which plan it belongs to, and what the run is doing."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, ValidationError

from specdec.runs.plan import SweepPlan, differences
from specdec.runs.results import CELLS_FOLDER, write_atomic

LOCK_WAIT_S = 1.0  # `read_status` holds the lock of a run that has ended for an instant


class Status(BaseModel):
    """What a run is doing; OUT/status.json. Times are UTC, ISO 8601."""

    model_config = ConfigDict(extra="forbid")

    run_id: str
    pid: int
    state: str  # "running" | "done" | "interrupted" | "failed"
    cells_total: int
    cells_done: int  # failed ones included
    cells_failed: int
    now: str | None = None  # the cell at work, or the server that is starting
    last_result: str | None = None
    seconds_left: float | None = None
    started_at: str
    updated_at: str


@contextlib.contextmanager
def folder_lock(out: Path) -> Iterator[None]:
    """Hold OUT/lock; the system lets go of it when this process ends in any way.

    Raises ValueError that names the holder if another process has it.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("a+") as file:
        deadline = time.monotonic() + LOCK_WAIT_S
        while not (taken := _take(file)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not taken:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise ValueError(f"{out} is in use by {holder}; wait for it, or give another folder")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
        yield


def _take(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_folder(out: Path, plan: SweepPlan) -> str:
    """Write plan.json, or hold `plan` against the one that is there; the id of the run.

    Removes what a kill left half-written. Raises ValueError that says what differs.
    """
    path = out / "plan.json"
    if not path.exists():
        if (out / CELLS_FOLDER).exists():
            raise ValueError(f"{out} holds cells but no plan.json; give another folder")
        run_id = f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        content = {"run_id": run_id, "plan": plan.model_dump(mode="json")}
        write_atomic(path, (json.dumps(content, indent=1) + "\n").encode())
        return run_id
    run_id, there = read_plan(out)
    if differs := differences(there, plan):
        raise ValueError(
            f"{out} holds another plan ({'; '.join(differs)}: there, asked); ask for the same to go on, "
            "or give another folder"
        )
    for left in (*out.glob(".*.tmp"), *(out / CELLS_FOLDER).glob(".*.tmp")):
        left.unlink()
    return run_id


def read_plan(out: str | Path) -> tuple[str, SweepPlan]:
    """(run id, plan) of a run folder. Raises ValueError in one line if it is none."""
    path = Path(out) / "plan.json"
    try:
        content = json.loads(path.read_bytes())
        return str(content["run_id"]), SweepPlan.model_validate_json(json.dumps(content["plan"]))
    except FileNotFoundError:
        raise ValueError(f"{out} is no run folder: it has no plan.json") from None
    except (ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is no plan of this version ({reason}); give another folder") from None


def read_status(out: str | Path) -> Status:
    """What the run in `out` is doing; "killed" if it says running but no process holds the folder.

    Raises ValueError in one line if there is no run.
    """
    path = Path(out) / "status.json"
    try:
        status = Status.model_validate_json(path.read_bytes())
        with (Path(out) / "lock").open("r") as lock:
            if status.state == "running" and _take(lock):
                status.state = "killed"
    except OSError:
        raise ValueError(f"{out} holds no run: there is no {path.name}") from None
    except ValidationError as error:
        raise ValueError(f"{path}: {error.errors()[0]['msg']}") from None
    return status


def utc_now() -> str:
    """Now, UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
