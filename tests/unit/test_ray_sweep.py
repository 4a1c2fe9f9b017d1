"""A sweep on a Ray cluster: what is handed out, what comes back, what a death costs. Over a fake Ray and servers."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeServer
from ray_fakes import FakeRay
from sweep_fakes import StartedServers, fake_servers, measured

from specdec import cli
from specdec.load.cell import Measured
from specdec.load.loop_thread import CellError
from specdec.runs import ray_sweep, sweep
from specdec.runs.plan import SweepPlan, make_plan
from specdec.runs.ray_sweep import run_ray_sweep
from specdec.runs.results import read_cells
from specdec.runs.run_folder import read_status
from specdec.runs.sweep import run_sweep
from specdec.servers.profile import load_profile

PLAN = make_plan("cpu-tiny", workers=["v2"], concurrencies=[1, 8], thresholds=[4], repeats=1)
ALL = [cell.cell_id for cell in PLAN.cells(0)]
BASELINE = [cell.cell_id for cell in PLAN.cells(0) if cell.arm.worker == "none"]
V2 = [cell.cell_id for cell in PLAN.cells(0) if cell.arm.worker == "v2"]
ARGUMENTS = ["--workers", "v2", "--concurrency", "1,8", "--thresholds", "4", "--repeats", "1"]  # PLAN
DEATH = "its Ray task died: The worker died unexpectedly."


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # what a task takes back is there again after the test
    before = signal.getsignal(signal.SIGTERM)
    yield fake
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> StartedServers:
    return fake_servers(monkeypatch)


def run(out: Path, plan: SweepPlan = PLAN, **options: Any) -> Any:
    return run_ray_sweep(plan, out, "auto", **options).set_index("cell_id")


def test_rows_are_those_of_a_sweep_on_one_machine(ray: FakeRay, servers: StartedServers, tmp_path: Path) -> None:
    here = run_sweep(PLAN, tmp_path / "here").set_index("cell_id").drop(columns=["run_id", "started_at"])
    there = run(tmp_path / "there")
    assert sorted(there.index) == sorted(ALL)
    assert there.loc[here.index, here.columns].equals(here)
    assert there["machine"].notna().all()
    assert (tmp_path / "there" / "results.csv").exists()
    assert read_status(tmp_path / "there").state == "done"


def test_a_task_per_server_that_ends_it(ray: FakeRay, servers: StartedServers, tmp_path: Path) -> None:
    """Static and dynamic share a server by live change, so also a task."""
    run(tmp_path)
    assert ray.tasks == ["specdec baseline", "specdec v2"]
    assert sorted(server.plan.name for server in servers.started) == ["baseline", "v2"]
    assert servers.up() == []
    assert ray.calls == ["init auto", "shutdown"]


@pytest.mark.parametrize("gpus", [0, 8])
def test_a_task_asks_for_the_gpus_of_a_server(ray: FakeRay, servers: StartedServers, tmp_path: Path, gpus: int) -> None:
    ray.gpus = gpus
    profile = load_profile("cpu-tiny").model_copy(update={"gpus": gpus, "side_by_side": False})
    run(tmp_path, make_plan(profile, workers=["v2"], concurrencies=[1], thresholds=[4], repeats=1))
    assert ray.options == {"max_retries": 0, "num_cpus": 1, "num_gpus": gpus}


def test_a_task_measures_in_the_order_of_the_plan(ray: FakeRay, servers: StartedServers, tmp_path: Path) -> None:
    rows = run(tmp_path, make_plan("cpu-tiny", workers=["v2"], concurrencies=[1, 8], thresholds=[4], repeats=2))
    v2 = rows[rows["worker"] == "v2"].sort_values("started_at", kind="stable")
    assert v2["repeat"].is_monotonic_increasing
    assert [cell for cell in v2.index if cell in V2] == V2


def test_a_row_is_kept_as_soon_as_it_comes(
    ray: FakeRay, servers: StartedServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And `specdec status` says which cells are at work."""
    seen: list[tuple[set[str], str | None]] = []
    wait = ray.wait

    def watch(*arguments: Any, **options: Any) -> Any:
        status = json.loads((tmp_path / "status.json").read_text())
        seen.append(({cell.cell_id for cell in read_cells(tmp_path)}, status["now"]))
        return wait(*arguments, **options)

    monkeypatch.setattr(ray, "wait", watch)
    run(tmp_path)
    assert seen[0] == (set(), None)  # the tasks wait for a place
    assert (set(), f"{BASELINE[0]}, {V2[0]}") in seen
    assert ({V2[0]}, f"{BASELINE[0]}, {V2[1]}") in seen or ({BASELINE[0]}, f"{BASELINE[1]}, {V2[0]}") in seen
    assert max(len(rows) for rows, _ in seen) == len(ALL)


def test_the_same_call_goes_on_with_what_is_missing(ray: FakeRay, servers: StartedServers, tmp_path: Path) -> None:
    first = run(tmp_path)
    run(tmp_path)
    assert len(ray.tasks) == 2
    (tmp_path / "cells" / f"{V2[1]}.json").unlink()
    second = run(tmp_path)
    assert ray.tasks[2:] == ["specdec v2"]
    same = [cell for cell in ALL if cell != V2[1]]
    assert second.loc[same].equals(first.loc[same])
    assert second.loc[V2[1], "started_at"] > first.loc[V2[1], "started_at"]


def test_logs_of_the_servers_come_with_the_rows(ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what a dead task's server had said before; nothing comes twice."""
    servers = fake_servers(monkeypatch)
    start = servers.start
    folders: dict[str, Path] = {}

    def write_log(plan: Any, log_dir: Path, timeout_s: float) -> FakeServer:
        folders[plan.name] = log_dir
        (log_dir / f"server-{plan.name}-1.log").write_text("started\n")
        return start(plan, log_dir, timeout_s)

    def run_cell(server: FakeServer, prompts: Any, concurrency: int, output_tokens: int, *_: Any) -> Measured:
        with (folders[server.plan.name] / f"server-{server.plan.name}-1.log").open("a") as log:
            log.write(f"{concurrency}\n")
        return measured(prompts, concurrency, output_tokens)

    monkeypatch.setattr(servers, "start", write_log)
    monkeypatch.setattr(sweep, "run_cell", run_cell)
    ray.dies["specdec baseline"] = [2]
    run(tmp_path)
    assert (tmp_path / "logs" / "server-v2-1.log").read_text() == "started\n1\n1\n8\n8\n"
    assert (tmp_path / "logs" / "server-baseline-1.log").read_text() == "started\n1\n"
    assert not any(folder.exists() for folder in folders.values())


# What goes wrong


def test_a_failed_cell_is_a_row_and_its_task_goes_on(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[str] = []

    def run_cell(server: FakeServer, prompts: Any, concurrency: int, output_tokens: int, *_: Any) -> Measured:
        if server.plan.name == "v2" and not failed:
            failed.append("once")
            raise CellError("stalled: no token for 120 s; /health answers 200")
        return measured(prompts, concurrency, output_tokens)

    servers = fake_servers(monkeypatch, run_cell)
    rows = run(tmp_path)
    assert rows["error"].dropna().to_dict() == {V2[0]: "stalled: no token for 120 s; /health answers 200"}
    assert rows.loc[V2, "server_restarts"].tolist() == [0, 1, 1, 1]
    assert len(ray.tasks) == 2
    assert [server.plan.name for server in servers.started].count("v2") == 2


def test_a_task_that_dies_costs_the_cell_at_work(ray: FakeRay, servers: StartedServers, tmp_path: Path) -> None:
    ray.dies["specdec v2"] = [2]  # it has begun and sent one row
    rows = run(tmp_path)
    assert rows["error"].dropna().to_dict() == {V2[1]: DEATH}
    assert rows.loc[V2[1], "machine"] == rows.loc[V2[0], "machine"]
    assert rows.loc[V2, "server_restarts"].tolist() == [0, 0, 1, 1]
    assert ray.tasks == ["specdec baseline", "specdec v2", "specdec v2"]
    assert servers.up() == []
    assert read_status(tmp_path).cells_failed == 1


def test_tasks_that_die_one_after_the_other_are_given_up(ray: FakeRay, servers: StartedServers, tmp_path: Path) -> None:
    """No fourth task after three without a row; a row in between begins the count anew."""
    ray.dies["specdec v2"] = [0, 1, 0]
    rows = run(tmp_path)
    assert rows["error"].dropna().to_dict() == dict.fromkeys(V2, DEATH)
    assert rows.loc[V2[0], "machine"] == "none: not begun"
    assert ray.tasks.count("specdec v2") == 3
    assert run(tmp_path, retry_failed=True)["error"].isna().all()


def test_a_row_between_deaths_counts(ray: FakeRay, servers: StartedServers, tmp_path: Path) -> None:
    plan = make_plan("cpu-tiny", workers=["v2"], concurrencies=[1, 4, 8], thresholds=[4], repeats=1)
    ray.dies["specdec v2"] = [0, 0, 2, 0]
    rows = run(tmp_path, plan)
    assert rows["error"].notna().sum() == 4
    assert rows[rows["worker"] == "v2"]["error"].isna().sum() == 2


def test_a_machine_that_is_not_set_up_costs_all_its_cells(
    ray: FakeRay, servers: StartedServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another task would end there the same way."""
    monkeypatch.setattr(sweep, "installed_release", lambda: "0.5.23")
    rows = run(tmp_path)
    where = f"its Ray task failed on {platform.node()}"
    reason = f"{where}: the plan is for SGLang 0.5.12, this environment has 0.5.23"
    assert rows["error"].to_dict() == dict.fromkeys(ALL, reason)
    assert len(ray.tasks) == 2
    assert servers.started == []


def test_a_machine_without_this_package_says_so(
    ray: FakeRay, servers: StartedServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = ray_sweep._remote_function()
    monkeypatch.setitem(sys.modules, "specdec.runs.ray_sweep", None)
    with pytest.raises(RuntimeError, match=r"^on .*: no specdec.runs.ray_sweep in the Python that Ray runs there"):
        next(function())


def test_a_task_does_not_measure_other_cells_than_asked(servers: StartedServers) -> None:
    """Where a machine's checkout is another one than the driver's."""
    with pytest.raises(ValueError, match="its checkout plans other cells than the driver's"):
        next(ray_sweep.measure_share(PLAN.model_dump_json(), "run", ["v2-static-c099-r0"], 0))


def test_interrupt_cancels_the_tasks_and_keeps_the_rows(ray: FakeRay, servers: StartedServers, tmp_path: Path) -> None:
    ray.interrupt_at_step = 5
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert servers.up() == []
    assert len(read_cells(tmp_path)) == 2
    assert read_status(tmp_path).state == "interrupted"
    tasks = ["specdec baseline", "specdec v2"]
    ended = [f"cancel {task}" for task in tasks] + [f"wait for {' completed, '.join(tasks)} completed", "shutdown"]
    assert ray.calls == ["init auto", *ended]
    ray.interrupt_at_step = None
    assert len(run(tmp_path)) == len(ALL)


def test_sigterm_still_ends_a_sweep_as_ctrl_c_does(ray: FakeRay, servers: StartedServers, tmp_path: Path) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler


@pytest.mark.parametrize("own", [None, "3"])
def test_a_server_gets_the_machines_own_number_of_threads(own: str | None) -> None:
    """Ray sets OMP_NUM_THREADS where the machine does not: a server would be slower than without Ray."""
    program = (
        "import os; os.environ.setdefault('OMP_NUM_THREADS', '1'); from specdec.runs import ray_sweep; "
        "ray_sweep._forget_thread_limit(); print(os.environ.get('OMP_NUM_THREADS'))"
    )
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env |= {} if own is None else {"OMP_NUM_THREADS": own}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(own)


def test_threads_are_set_right_before_a_server_starts(
    ray: FakeRay, servers: StartedServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_before: list[int] = []
    monkeypatch.setattr(ray_sweep, "_forget_thread_limit", lambda: started_before.append(len(servers.started)))
    run(tmp_path)
    assert started_before == [0, 0]


# The command line


@pytest.fixture
def specdec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Runs `specdec sweep OUT` for PLAN with further arguments in this process; its exit code."""
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["specdec", "sweep", str(tmp_path / "out"), *ARGUMENTS, *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0)

    return run


def test_command_line(
    ray: FakeRay, servers: StartedServers, specdec: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert specdec("--ray", "auto") == 0
    assert f"{len(ALL)} cells in" in capsys.readouterr().out
    assert len(ray.tasks) == 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("address", "arguments", "reason"),
    [
        (
            "auto",
            ["--target-ci=0.1", "--max-repeats=9"],
            "--ray goes without --target-ci: each further repeat would start every server",
        ),
        ("local", [], "--ray must be auto, or HOST:PORT of the cluster's head, got 'local'"),
        ("ray://head:10001", [], "--ray must be auto, or HOST:PORT of the cluster's head, got 'ray://head:10001'"),
        (f"127.0.0.1:{free_port()}", [], "no Ray cluster there ([Errno 111] Connection refused)"),
        ("127.0.0.1:99999", [], "no Ray cluster there"),
        ("auto", ["--profile=gpu-tiny"], "--ray auto: a server takes 1 GPUs, the cluster's largest machine has 0"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    ray: FakeRay,
    servers: StartedServers,
    specdec: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    address: str,
    arguments: list[str],
    reason: str,
) -> None:
    assert specdec("--ray", address, *arguments) == 2
    errors = capsys.readouterr().err
    assert reason in errors
    assert len(errors.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
    assert ray.tasks == []


def test_without_ray_it_says_what_to_install(
    specdec: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert specdec("--ray", "auto") == 2
    assert capsys.readouterr().err == "specdec: --ray needs ray: pip install 'specdec[ray]'\n"


def test_a_cluster_that_ray_cannot_join_is_one_line(
    ray: FakeRay, specdec: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.1\n")

    monkeypatch.setattr(ray, "init", refuse)
    assert specdec("--ray", "auto") == 2
    assert capsys.readouterr().err == (
        "specdec: --ray auto: Version mismatch: The cluster was started with: Ray: 2.1\n"
    )
