"""`specdec sweep --ray` on a Ray cluster of this machine with real servers: a task is killed, resumed, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import psutil
import pytest
from shapes import RELEASE

from specdec.runs.plan import make_plan
from specdec.runs.ray_sweep import Ended, RayTasks, split
from specdec.runs.results import read_results
from specdec.servers.supervise import is_alive, tree_processes

ray = pytest.importorskip("ray")

PLAN = make_plan(
    "cpu-tiny", sglang=RELEASE, workers=["v2"], concurrencies=[1, 2], thresholds=[1], repeats=1, output_tokens=16
)
GRID = ["--workers", "v2", "--concurrency", "1,2", "--thresholds", "1", "--repeats", "1", "--output-tokens", "16"]
SPECDEC = Path(sys.executable).with_name("specdec")
START_ATTEMPTS = 5  # of the cluster
LIMIT_S = 400.0  # for what includes a server's start on a crowded machine
GONE_LIMIT_S = 30.0  # a server is given 5 s to end by itself


@dataclass(frozen=True)
class Stage:
    """A command that has ended."""

    code: int
    said: str
    rows: pd.DataFrame
    gone: list[psutil.Process]  # processes that must have ended


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of this machine alone; nothing of it may be left."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token into the home folder
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # which ends tasks when the machine's memory is nearly full
        patch.setenv("TMPDIR", folder)  # a killed task cannot remove its server's logs
        not_of_ray = tree_processes(os.getpid())
        address = start_cluster(folder)
        try:
            yield address
        finally:
            of_ray = [process for process in tree_processes(os.getpid()) if process not in not_of_ray]
            ray.shutdown()
        assert of_ray
        wait_until(lambda: not any(map(is_alive, of_ray)), GONE_LIMIT_S)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray") / "run"


@pytest.fixture(scope="module")
def killed(address: str, out: Path) -> Stage:
    """The whole grid; kill -9 of the process that measures v2 when it has sent its first row."""
    with sweep(address, out) as process:
        wait_until(lambda: process.poll() is not None or any(out.glob("cells/v2-*.json")), LIMIT_S)
        worker = task("specdec v2")
        assert worker, process.communicate()
        server = tree_processes(worker.pid)
        worker.kill()
        return ended(process, out, [worker, *server])


@pytest.fixture(scope="module")
def resumed(address: str, out: Path, killed: Stage) -> tuple[Stage, dict[str, int]]:
    """The same command again, and when each cell's file was written before it."""
    written = {path.stem: path.stat().st_mtime_ns for path in out.glob("cells/*.json")}
    with sweep(address, out) as process:
        return ended(process, out, []), written


@pytest.fixture(scope="module")
def interrupted(address: str, out: Path, resumed: object) -> Stage:
    """Ctrl-C while the server for the failed cell starts."""
    with sweep(address, out, "--retry-failed") as process:
        wait_until(lambda: process.poll() is not None or len(servers_of("specdec v2")) > 1, LIMIT_S)
        worker, server = task("specdec v2"), servers_of("specdec v2")
        assert worker, process.communicate()
        process.send_signal(signal.SIGINT)
        return ended(process, out, [*server])


def test_every_arm_has_rows_from_live_servers_in_one_table(killed: Stage) -> None:
    assert set(killed.rows.index) == {cell.cell_id for cell in PLAN.cells(0)}
    good = killed.rows[killed.rows["error"].isna()]
    assert set(good["arm"]) == {"baseline", "static", "dynamic"}
    assert (good["output_tokens"] == good["num_prompts"] * 16).all()
    assert set(good["sglang"]) == {RELEASE}
    assert (good.loc[good["arm"] != "baseline", "worker_class"] == "EAGLEWorkerV2").all()
    assert good["machine"].nunique() == 1


def test_a_killed_task_costs_its_cell_and_leaves_no_server(killed: Stage) -> None:
    bad = killed.rows[killed.rows["error"].notna()]
    assert len(bad) == 1
    assert bad["worker"].tolist() == ["v2"]
    assert bad["error"].iloc[0].startswith("its Ray task died: ")
    assert killed.code == 1
    assert len(killed.gone) > 2  # the task, the supervisor, the server, what that started
    assert not any(map(is_alive, killed.gone))
    later = killed.rows[(killed.rows["worker"] == "v2") & (killed.rows["started_at"] > bad["started_at"].iloc[0])]
    assert set(later["server_restarts"]) == {1}


def test_logs_of_both_servers_are_in_the_run_folder(killed: Stage, out: Path) -> None:
    for name in ("baseline", "v2"):
        assert "Uvicorn running" in (out / "logs" / f"server-{name}-1.log").read_text()


def test_the_same_command_measures_nothing(resumed: tuple[Stage, dict[str, int]], out: Path) -> None:
    stage, written = resumed
    assert {path.stem: path.stat().st_mtime_ns for path in out.glob("cells/*.json")} == written
    assert "6 cells in" in stage.said


def test_ctrl_c_ends_the_servers_and_keeps_the_rows(interrupted: Stage) -> None:
    assert interrupted.code == 130
    assert "interrupted; what is measured is kept" in interrupted.said
    assert "Traceback" not in interrupted.said
    assert len(interrupted.rows) == 6
    assert interrupted.gone
    assert not any(map(is_alive, interrupted.gone))


def test_a_task_that_cannot_work_says_why(address: str) -> None:
    """Ray hands on what a task raises as an error of its own making."""
    tasks = RayTasks(ray, PLAN.model_copy(update={"sglang": "0.5.99"}))
    tasks.start("run", split(PLAN.cells(0))[0])
    ((_, news),) = tasks.news()
    assert isinstance(news, Ended)
    assert news.error is not None
    assert news.error.startswith("its Ray task failed on ")
    assert news.error.endswith(f": the plan is for SGLang 0.5.99, this environment has {RELEASE}")


# What the stages are made of


def start_cluster(folder: str) -> str:
    """Address of a cluster that ends with `ray.shutdown`. Its helper processes must be up within 15 s, says Ray; on a
    crowded machine it may take a few tries.
    """
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            context = ray.init(
                address="local",
                num_cpus=2,
                include_dashboard=False,
                object_store_memory=100 * 2**20,
                log_to_driver=False,
                _temp_dir=folder,  # sockets lie below it: their paths must be short
            )
        except Exception:  # Ray's own kind for this
            ray.shutdown()
            if attempt == START_ATTEMPTS:
                raise
            continue
        address: str = context.address_info["gcs_address"]
        return address
    raise AssertionError("unreachable: the last attempt returns or raises")


@contextlib.contextmanager
def sweep(address: str, out: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [str(SPECDEC), "sweep", str(out), *GRID, "--ray", address, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A test run in the background has Ctrl-C switched off, and a process of its own inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ended(process: subprocess.Popen[str], out: Path, gone: list[psutil.Process]) -> Stage:
    """Wait for the command, and then until none of `gone` is left."""
    said, _ = process.communicate(timeout=LIMIT_S)
    wait_until(lambda: not any(map(is_alive, gone)), GONE_LIMIT_S)
    return Stage(process.returncode, said, read_results(out).set_index("cell_id"), gone)


def task(name: str) -> psutil.Process | None:
    """The process of a Ray task: Ray writes the task's name over its command."""
    for process in tree_processes(os.getpid()):
        try:
            if " ".join(process.cmdline()).startswith(f"ray::{name}"):
                return process
        except psutil.Error:
            continue
    return None


def servers_of(name: str) -> list[psutil.Process]:
    worker = task(name)
    return tree_processes(worker.pid) if worker else []


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
