"""One run on real servers through a night of faults; each stage goes on in the folder that the one before left.

1. `specdec sweep` in a terminal: a server is killed in a cell, the next one hangs in a cell, Ctrl-C in the last cell.
2. A cell file is torn by hand; notebook 01 goes on, and its kernel, the process that sweeps, is killed.
3. The same notebook again runs to its end.

A full disk and two runs into one folder need no server: tests/unit/test_sweep.py.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from shapes import RELEASE
from terminal import Terminal

from specdec.notebooks import NotebookFailed, run_notebook
from specdec.runs.plan import make_plan
from specdec.runs.results import read_results
from specdec.servers.profile import ROOT
from specdec.servers.supervise import is_alive, tree_processes

pytestmark = pytest.mark.skipif(RELEASE != "0.5.12", reason="a sweep does not depend on the release: run on 0.5.12")

NOTEBOOK = ROOT / "notebooks" / "01_baseline_vs_eagle3.ipynb"
STALL_S = 10.0
# The command `specdec`, but with that patience.
SPECDEC = (
    "import functools; from specdec import cli; from specdec.runs import sweep; "
    f"sweep.run_sweep = functools.partial(sweep.run_sweep, stall_s={STALL_S}); cli.main()"
)
LIMIT_S = 400.0  # for what includes a server's start on a crowded machine
END_LIMIT_S = 60.0  # from a fault to the end of its command
GONE_LIMIT_S = 30.0  # from there until nothing is left; a server is given 5 s to end by itself


@dataclass(frozen=True)
class Night:
    """The run, and the cells in which something happens to it."""

    out: Path
    profile: Path
    cells: list[str]  # ids, in the order of measuring
    killed: str
    after_kill: str
    hung: str
    after_hang: str
    last: str


@dataclass(frozen=True)
class Ended:
    """A run that was ended from outside."""

    took_s: float  # until its command ended
    said: str
    left: list[str]  # processes and ports that were still there after GONE_LIMIT_S
    files: dict[str, bytes]  # of its cells
    rows: pd.DataFrame  # by cell_id
    status: str  # what `specdec status` says


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Night:
    """Short cells of cpu-tiny, and a /health that says 200 also while the scheduler hangs, as a user can set it."""
    folder = tmp_path_factory.mktemp("faults")
    profile = (ROOT / "env" / "profiles" / "cpu-tiny.toml").read_text()
    for old, new in {
        'name = "cpu-tiny"': 'name = "faults"',
        "output_tokens = 64": "output_tokens = 48",
        "\n[env]\n": '\n[env]\nSGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION = "0"\n',
    }.items():
        assert profile.count(old) == 1, old
        profile = profile.replace(old, new)
    path = folder / "faults.toml"
    path.write_text(profile)
    plan = make_plan(path, workers=["v2"], concurrencies=[1, 4], thresholds=[0, 2], repeats=1)
    speculating = [cell.cell_id for cell in plan.cells(0) if cell.arm.worker == "v2"]
    return Night(folder / "run", path, [cell.cell_id for cell in plan.cells(0)], *speculating[:4], speculating[-1])


# Stage 1


@pytest.fixture(scope="module")
def terminal_run(night: Night) -> tuple[Ended, str]:
    """Stage 1; with what `specdec status` said meanwhile from another terminal."""
    grid = ["--workers", "v2", "--concurrency", "1,4", "--thresholds", "0,2", "--repeats", "1"]
    command = [sys.executable, "-c", SPECDEC, "sweep", str(night.out), "--profile", str(night.profile), *grid]
    logs = night.out / "logs"
    with Terminal(command) as terminal:

        def until(condition: Callable[[], bool]) -> None:
            wait_until(lambda: condition() or terminal.process.poll() is not None, LIMIT_S)
            assert terminal.process.poll() is None, terminal.shown()

        until(lambda: under_load(logs / "server-v2-1.log", cells=1))
        scheduler(logs / "server-v2-1.log").kill()
        until(lambda: status(night.out).get("now") == night.after_kill)
        status_meanwhile = specdec_status(night.out)  # a new server is starting
        until(lambda: under_load(logs / "server-v2-2.log", cells=2))
        scheduler(logs / "server-v2-2.log").suspend()
        until(lambda: status(night.out).get("now") == night.last)
        there = Traces.of(terminal.process.pid)
        time.sleep(random.uniform(0, 1.5))
        began_s = time.monotonic()
        terminal.press_ctrl_c()
        terminal.process.wait(END_LIMIT_S)
        took_s = time.monotonic() - began_s
        said = f"exit code {terminal.process.returncode}\n{terminal.shown()}"
    return ended(night.out, there, took_s, said), status_meanwhile


def test_a_killed_scheduler_costs_its_cell_alone(night: Night, terminal_run: tuple[Ended, str]) -> None:
    """Case 18: the row says why and shows the log; the next cell is measured on a fresh server."""
    rows = terminal_run[0].rows
    row, after = rows.loc[night.killed], rows.loc[night.after_kill]
    assert len(row["error"].splitlines()) == 1
    assert len(row["error_log_tail"].splitlines()) > 1
    assert pd.isna(row["output_tok_s"])
    assert pd.isna(after["error"])
    assert after["output_tok_s"] > 0
    assert (row["server_restarts"], after["server_restarts"]) == (0, 1)


def test_a_hung_scheduler_ends_its_cell_though_health_says_200(night: Night, terminal_run: tuple[Ended, str]) -> None:
    """Case 18: SIGSTOP leaves a process that lives and a port that answers, but no token comes."""
    rows = terminal_run[0].rows
    row, after = rows.loc[night.hung], rows.loc[night.after_hang]
    assert row["error"] == f"stalled: no token for {STALL_S:g} s; /health answers 200"
    assert len(row["error_log_tail"].splitlines()) > 1
    assert pd.isna(after["error"])
    assert (row["server_restarts"], after["server_restarts"]) == (1, 2)


def test_ctrl_c_keeps_the_rows_and_leaves_nothing(night: Night, terminal_run: tuple[Ended, str]) -> None:
    """Case 17: no process and no port is left. The cell that was interrupted is no row."""
    run, _ = terminal_run
    assert run.said.startswith("exit code 130\n"), run.said
    assert "interrupted; what is measured is kept" in run.said
    assert "Traceback" not in run.said
    assert run.left == []
    assert set(run.rows.index) == set(night.cells[: night.cells.index(night.last)])
    assert run.status.startswith(f"{night.out}: interrupted, {len(run.rows)} of {len(night.cells)} cells, 2 failed\n")


def test_progress_in_its_terminal_and_in_another(night: Night, terminal_run: tuple[Ended, str]) -> None:
    run, status_meanwhile = terminal_run
    done, total = night.cells.index(night.after_kill), len(night.cells)
    assert status_meanwhile.startswith(f"{night.out}: running, {done} of {total} cells, 1 failed\n")
    assert f"now: {night.after_kill} (process " in status_meanwhile
    assert f"last: {night.killed} failed: " in status_meanwhile
    assert re.search(rf"sweep faults: .* {done}/{total} \[", run.said)


# Stage 2


@pytest.fixture(scope="module")
def notebook_run(night: Night, terminal_run: tuple[Ended, str]) -> Ended:
    """Stage 2: the torn cell is measured anew, then the kernel is killed at a random instant of the last cell."""
    tear(night.out / "cells" / f"{night.after_kill}.json")
    killed: list[tuple[Traces, float]] = []

    def in_the_last_cell() -> bool:
        now = status(night.out)
        return (now["state"], now["now"]) == ("running", night.last)

    def kill_the_kernel() -> None:
        wait_until(in_the_last_cell, LIMIT_S)
        kernel = status(night.out)["pid"]
        there = Traces.of(kernel)
        time.sleep(random.uniform(0, 1.5))
        os.kill(kernel, signal.SIGKILL)
        killed.append((there, time.monotonic()))

    killer = threading.Thread(target=kill_the_kernel, daemon=True)
    killer.start()
    with pytest.raises(NotebookFailed) as failure:
        run_notebook_01(night)
    ended_s = time.monotonic()
    killer.join()
    ((there, killed_s),) = killed
    return ended(night.out, there, ended_s - killed_s, str(failure.value))


def test_a_killed_kernel_ends_the_notebook_soon_and_leaves_nothing(night: Night, notebook_run: Ended) -> None:
    """Cases 17 and 19: the run ends with the reason; the servers of a process killed by -9 end all the same."""
    assert notebook_run.said.startswith(f"{NOTEBOOK.stem}: its kernel died")
    assert notebook_run.took_s < END_LIMIT_S
    assert notebook_run.left == []
    assert notebook_run.status.startswith(f"{night.out}: killed, {len(night.cells) - 1} of {len(night.cells)} cells")
    assert night.last not in notebook_run.rows.index


def test_a_torn_cell_is_measured_anew_and_the_others_stay(
    night: Night, terminal_run: tuple[Ended, str], notebook_run: Ended
) -> None:
    """Case 18: byte for byte."""
    torn, before, now = f"{night.after_kill}.json", terminal_run[0].files, notebook_run.files
    assert (night.out / "cells" / f"{torn}.set-aside").exists()
    assert set(now) == set(before)
    assert {name for name in now if now[name] != before[name]} == {torn}
    assert notebook_run.rows.loc[night.after_kill, "output_tok_s"] > 0


# Stage 3


def test_the_same_command_goes_on_to_the_end(night: Night, notebook_run: Ended) -> None:
    """Case 18: what was measured is as it was, what failed stays a row, and the notebook shows it."""
    executed = run_notebook_01(night)
    rows = read_results(night.out).set_index("cell_id")
    assert set(rows.index) == set(night.cells)
    assert set(rows.index[rows["error"].notna()]) == {night.killed, night.hung}
    assert rows["run_id"].nunique() == 1
    assert notebook_run.files.items() <= cell_files(night.out).items()
    assert specdec_status(night.out).startswith(f"{night.out}: done, {len(night.cells)} of {len(night.cells)} cells")
    assert f"stalled: no token for {STALL_S:g} s" in executed.read_text()


# What is done to a run, and what is seen of it


@dataclass(frozen=True)
class Traces:
    """The processes of a run, its servers' included, and the ports they listen on."""

    processes: list[psutil.Process]
    ports: set[int]

    @classmethod
    def of(cls, pid: int) -> Traces:
        processes = [psutil.Process(pid), *tree_processes(pid)]
        listening = [connection for process in processes for connection in process.net_connections("tcp")]
        return cls(processes, {one.laddr.port for one in listening if one.status == psutil.CONN_LISTEN})

    def left(self) -> list[str]:
        """Those that are still there."""
        found = [str(process) for process in self.processes if is_alive(process)]
        return found + [f"port {port}" for port in sorted(self.ports) if answers(port)]


def ended(out: Path, there: Traces, took_s: float, said: str) -> Ended:
    assert len(there.processes) > 3, "there was no server"
    assert there.ports
    deadline = time.monotonic() + GONE_LIMIT_S
    while (left := there.left() + holders(out)) and time.monotonic() < deadline:
        time.sleep(0.2)
    rows = read_results(out).set_index("cell_id")
    return Ended(took_s, said, left, cell_files(out), rows, specdec_status(out))


def holders(out: Path) -> list[str]:
    """Processes that hold a file of the run open: a server its log, whoever its parent is by now."""
    found = []
    for process in psutil.process_iter(["open_files"]):
        if any(file.path.startswith(f"{out}/") for file in process.info["open_files"] or []):
            found.append(str(process))
    return found


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def scheduler(log: Path) -> psutil.Process:
    """The scheduler of the server that writes this log."""
    for process in psutil.process_iter(["cmdline", "open_files"]):
        is_scheduler = (process.info["cmdline"] or [""])[0].startswith("sglang::scheduler")
        if is_scheduler and any(file.path == str(log) for file in process.info["open_files"] or []):
            return process
    raise AssertionError(f"no scheduler writes to {log}")


def under_load(log: Path, cells: int) -> bool:
    """Whether a server answers the requests of its cell number `cells`: each cell begins with a flush of the cache."""
    if not log.exists():
        return False
    parts = log.read_text(errors="replace").split("POST /flush_cache")
    return len(parts) == cells + 1 and "POST /generate" in parts[-1]


def tear(path: Path) -> None:
    """As a disk that was pulled leaves a file."""
    path.write_bytes(path.read_bytes()[:200])


def status(out: Path) -> dict[str, Any]:
    path = out / "status.json"
    content: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    return content


def specdec_status(out: Path) -> str:
    command = [str(Path(sys.executable).with_name("specdec")), "status", str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def cell_files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / "cells").glob("*.json")}


def run_notebook_01(night: Night) -> Path:
    grid = {"workers": "v2", "concurrency": "1,4", "thresholds": "0,2", "repeats": 1}
    return run_notebook(NOTEBOOK, night.out, {"profile": str(night.profile), **grid, "out": str(night.out)})


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
