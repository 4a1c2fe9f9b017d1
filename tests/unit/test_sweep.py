"""A run: what it measures, what survives, what it refuses. Over fake servers."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeServer
from sweep_fakes import StartedServers, fake_servers, measured

from specdec import cli
from specdec.load.cell import Measured
from specdec.load.loop_thread import CellError
from specdec.runs import sweep
from specdec.runs.plan import SweepPlan, make_plan
from specdec.runs.results import read_cells, read_results
from specdec.runs.run_folder import folder_lock, read_plan, read_status
from specdec.runs.sweep import run_sweep
from specdec.servers.profile import load_profile
from specdec.servers.server import ServerDied

HERE = Path(__file__).parent
PLAN = make_plan("cpu-tiny", concurrencies=[1, 8], thresholds=[4], repeats=1)
ALL = {cell.cell_id for cell in PLAN.cells(0)}
SWEEP_ARGUMENTS = ["--concurrency", "1,8", "--thresholds", "4", "--repeats", "1"]  # PLAN on the command line


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> StartedServers:
    return fake_servers(monkeypatch)


def failing(monkeypatch: pytest.MonkeyPatch, fails: Any) -> tuple[StartedServers, list[str]]:
    """Fakes whose cells raise what `fails(server, number)` returns, if any; what was measured, in order."""
    measured_on: list[str] = []

    def run_cell(server: FakeServer, prompts: Any, concurrency: int, output_tokens: int, *_: Any) -> Measured:
        measured_on.append(f"{server.plan.name}-c{concurrency}")
        if error := fails(server, len(measured_on)):
            raise error
        return measured(prompts, concurrency, output_tokens)

    return fake_servers(monkeypatch, run_cell), measured_on


def test_measures_every_cell_once_and_ends_its_servers(servers: StartedServers, tmp_path: Path) -> None:
    frame = run_sweep(PLAN, tmp_path)
    assert set(frame["cell_id"]) == ALL
    assert frame["error"].isna().all()
    assert [server.plan.name for server in servers.started].count("baseline") == 1
    assert len(servers.started) == 3  # baseline, v1, v2: static and dynamic share one by live change
    assert servers.up() == []
    assert read_status(tmp_path).state == "done"
    assert (tmp_path / "results.csv").exists()


def test_rows_say_what_the_server_said(servers: StartedServers, tmp_path: Path) -> None:
    frame = run_sweep(PLAN, tmp_path).set_index("cell_id")
    row = frame.loc["v1-dynamic4-c008-r0"]
    assert (row["worker_class"], row["worker_file"]) == (
        "EAGLEWorker",
        "sglang/srt/speculative/eagle_worker.py",
    )
    assert (row["threshold"], row["resume_threshold"], row["topk"], row["sglang"]) == (4, 4, 4, "0.5.12")
    assert (row["prompt_set"], row["prompt_set_sha256"]) == (PLAN.prompt_set, PLAN.prompt_set_sha256)  # case 15
    assert "--speculative-algorithm EAGLE3" in row["server_flags"]
    assert "/usr" not in row["server_flags"]
    baseline = frame.loc["baseline-c008-r0"]
    assert baseline[["worker_class", "threshold", "topk", "draft_model"]].isna().all()
    assert frame["threshold"].loc["v1-static-c008-r0"] is not row["threshold"]


def test_second_call_measures_nothing(servers: StartedServers, tmp_path: Path) -> None:
    first = run_sweep(PLAN, tmp_path)
    started = len(servers.started)
    second = run_sweep(PLAN, tmp_path)
    assert len(servers.started) == started
    assert second["started_at"].tolist() == first["started_at"].tolist()


def test_lost_and_torn_cells_are_measured_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Case 18: a half-written file breaks no resume."""
    _, measured_on = failing(monkeypatch, lambda *_: None)
    run_sweep(PLAN, tmp_path)
    cells = tmp_path / "cells"
    (cells / "baseline-c001-r0.json").unlink()
    torn = cells / "v2-static-c008-r0.json"
    torn.write_bytes(torn.read_bytes()[:100])
    (cells / ".v1-static-c001-r0.json.abc.tmp").write_text("half")
    kept = {path.name: path.stat().st_mtime_ns for path in cells.glob("*.json") if path != torn}
    measured_on.clear()
    frame = run_sweep(PLAN, tmp_path)
    assert sorted(measured_on) == ["baseline-c1", "v2-c8"]
    assert set(frame["cell_id"]) == ALL
    assert {name: (cells / name).stat().st_mtime_ns for name in kept} == kept
    assert not list(cells.glob(".*.tmp"))


def test_failed_cell_is_a_row_and_the_next_gets_a_fresh_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first_v1: list[FakeServer] = []

    def fails(server: FakeServer, _: int) -> Exception | None:
        if server.plan.name == "v1" and not first_v1:
            first_v1.append(server)
            return CellError("stalled: no token for 120 s; /health answers 200")
        return None

    servers, _ = failing(monkeypatch, fails)
    frame = run_sweep(PLAN, tmp_path)
    assert set(frame["cell_id"]) == ALL
    bad = frame[frame["error"].notna()]
    assert bad["error"].tolist() == ["stalled: no token for 120 s; /health answers 200"]
    assert bad["error_log_tail"].tolist() == ["the last line of the log"]
    assert bad["output_tok_s"].isna().all()  # no number, not 0
    assert not first_v1[0].running()
    assert [server.plan.name for server in servers.started].count("v1") == 2
    later = frame[(frame["worker"] == "v1") & frame["error"].isna()]
    assert set(later["server_restarts"]) == {1}
    assert set(frame.loc[frame["worker"] == "v2", "server_restarts"]) == {0}
    lost = later["cell_id"].iloc[-1]
    (tmp_path / "cells" / f"{lost}.json").unlink()
    resumed = run_sweep(PLAN, tmp_path).set_index("cell_id")
    assert resumed.loc[lost, "server_restarts"] == 1, "the column counts over the whole run"


def test_server_death_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def dies(server: FakeServer, number: int) -> Exception | None:
        if number == 2:
            server.stop()
            return ServerDied("server v1 ended (exit status -9); log x:\nKilled")
        return None

    failing(monkeypatch, dies)
    errors = run_sweep(PLAN, tmp_path)["error"].dropna().tolist()
    assert len(errors) == 1
    assert errors[0].startswith("the server ended: server")


def test_a_wrong_count_is_a_row_with_numbers_and_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_cell(server: FakeServer, prompts: Any, concurrency: int, output_tokens: int, *_: Any) -> Measured:
        changes = {"output_tokens": 3, "error": "output tokens: asked 4"} if server.plan.name == "v2" else {}
        return measured(prompts, concurrency, output_tokens, **changes)

    servers = fake_servers(monkeypatch, run_cell)
    frame = run_sweep(PLAN, tmp_path)
    assert set(frame.loc[frame["worker"] == "v2", "error"]) == {"output tokens: asked 4"}
    assert set(frame.loc[frame["worker"] == "v2", "output_tokens"]) == {3}
    assert len(servers.started) == 3  # the server itself is well


def test_a_broken_invariant_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_cell(server: FakeServer, prompts: Any, concurrency: int, output_tokens: int, *_: Any) -> Measured:
        return measured(prompts, concurrency, output_tokens, achieved_batch_peak=99)

    fake_servers(monkeypatch, run_cell)
    frame = run_sweep(PLAN, tmp_path)
    assert frame["error"].str.contains("peak batch 99 above the concurrency").all()


def test_a_server_that_never_starts_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    servers, _ = failing(monkeypatch, lambda *_: None)
    refused: list[str] = []

    def refuse(plan: Any) -> Exception | None:
        if plan.worker == "v1":
            refused.append(plan.name)
            return ServerDied("server v1 ended before it was ready; log:\nno memory")
        return None

    servers.refuse = refuse
    frame = run_sweep(PLAN, tmp_path)
    assert len(refused) == 3
    errors = frame.loc[frame["worker"] == "v1", "error"].tolist()
    tried = "server v1 ended before it was ready; log:"  # before the blocks, and for two cells
    assert sorted(errors) == ["not tried: its server failed 3 times in a row"] * 2 + [tried] * 2
    assert "no memory" in frame.loc[frame["worker"] == "v1", "error_log_tail"].iloc[0]
    assert frame.loc[frame["worker"] != "v1", "error"].isna().all()


def test_failed_cells_stay_until_retried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = [True]
    _, measured_on = failing(
        monkeypatch, lambda server, _: CellError("x") if broken[0] and server.plan.name == "v2" else None
    )
    run_sweep(PLAN, tmp_path)
    broken[0] = False
    measured_on.clear()
    assert run_sweep(PLAN, tmp_path)["error"].notna().sum() == 4
    assert measured_on == []
    assert run_sweep(PLAN, tmp_path, retry_failed=True)["error"].isna().all()
    assert len(measured_on) == 4


def test_interrupt_ends_servers_and_keeps_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    servers, _ = failing(monkeypatch, lambda _, number: KeyboardInterrupt() if number == 4 else None)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(PLAN, tmp_path)
    assert servers.up() == []
    assert len(read_cells(tmp_path)) == 3
    assert len(read_results(tmp_path)) == 3
    assert read_status(tmp_path).state == "interrupted"
    fake_servers(monkeypatch)
    assert len(run_sweep(PLAN, tmp_path)) == len(ALL)


def test_full_disk_stops_the_run_and_keeps_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    servers, _ = failing(monkeypatch, lambda *_: None)
    write, written = sweep.write_cell, []

    def write_until_full(out: Path, cell: Any) -> Path:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(cell.cell_id)
        return write(out, cell)

    monkeypatch.setattr(sweep, "write_cell", write_until_full)
    with pytest.raises(OSError, match="No space left"):
        run_sweep(PLAN, tmp_path)
    assert servers.up() == []
    monkeypatch.setattr(sweep, "write_cell", write)
    assert {cell.cell_id for cell in read_cells(tmp_path)} == set(written)
    assert len(run_sweep(PLAN, tmp_path)) == len(ALL)


def test_nothing_can_be_written_any_more(
    specdec: Callable[..., int],
    servers: StartedServers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A full disk takes neither a cell nor the tables nor the status: one line, and the rows before are kept."""
    make_file = tempfile.mkstemp

    def until_full(**where: Any) -> tuple[int, str]:
        if len(list(tmp_path.glob("cells/*.json"))) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return make_file(**where)

    monkeypatch.setattr(tempfile, "mkstemp", until_full)
    assert specdec("sweep", str(tmp_path), *SWEEP_ARGUMENTS) == 1
    errors = capsys.readouterr().err
    assert "stopped: [Errno 28] No space left on device" in errors
    assert "Traceback" not in errors
    assert servers.up() == []
    monkeypatch.setattr(tempfile, "mkstemp", make_file)
    kept = {cell.cell_id: cell.started_at for cell in read_cells(tmp_path)}
    assert len(kept) == 2
    assert specdec("sweep", str(tmp_path), *SWEEP_ARGUMENTS) == 0
    assert kept.items() <= {cell.cell_id: cell.started_at for cell in read_cells(tmp_path)}.items()


def test_servers_follow_each_other_where_one_fills_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    most_up: list[int] = []

    def watch(*_: Any) -> None:
        most_up.append(len(servers.up()))

    servers, _ = failing(monkeypatch, watch)
    plan = make_plan(
        load_profile("cpu-tiny").model_copy(update={"side_by_side": False}),
        concurrencies=[1],
        thresholds=[4],
        repeats=2,
    )
    run_sweep(plan, tmp_path)
    assert set(most_up) == {1}
    assert [server.plan.name for server in servers.started] == ["baseline", "v1", "v2", "v1", "baseline"]


def test_repeats_go_on_until_intervals_are_narrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At concurrency 1 the numbers scatter for three repeats; at 8 they are equal from the start."""
    calls: dict[tuple[str, int], int] = {}

    def run_cell(server: FakeServer, prompts: Any, concurrency: int, output_tokens: int, *_: Any) -> Measured:
        key = (f"{server.plan.name}-{server.threshold}", concurrency)
        number = calls[key] = calls.get(key, 0) + 1
        speed = 100.0 + (30 if concurrency == 1 and number == 1 else 0)
        return measured(prompts, concurrency, output_tokens, output_tok_s=speed)

    fake_servers(monkeypatch, run_cell)
    options: dict[str, Any] = {"concurrencies": [1, 8], "thresholds": [4], "workers": ["v1"], "repeats": 2}
    plan = make_plan("cpu-tiny", **options, target_ci=0.2, max_repeats=9)
    frame = run_sweep(plan, tmp_path)
    repeats = frame.groupby("concurrency")["repeat"].max() + 1
    assert repeats[8] == 2
    assert 3 < repeats[1] < 9
    assert len(frame) == 3 * (repeats[1] + repeats[8])
    assert len(run_sweep(plan, tmp_path)) == len(frame)
    assert read_status(tmp_path).cells_total == len(frame)


# The folder


def test_another_plan_is_refused_with_what_differs(servers: StartedServers, tmp_path: Path) -> None:
    run_sweep(PLAN, tmp_path)
    started = len(servers.started)
    other = make_plan("cpu-tiny", concurrencies=[1, 8], thresholds=[8], repeats=1)
    with pytest.raises(ValueError, match=r"holds another plan \(thresholds: \[4\], \[8\]: there, asked\)"):
        run_sweep(other, tmp_path)
    assert len(servers.started) == started


def test_cells_without_a_plan_and_a_broken_plan_are_refused(servers: StartedServers, tmp_path: Path) -> None:
    (tmp_path / "cells").mkdir()
    with pytest.raises(ValueError, match=r"holds cells but no plan\.json"):
        run_sweep(PLAN, tmp_path)
    (tmp_path / "plan.json").write_text('{"run_id": "x"}')
    with pytest.raises(ValueError, match="is no plan of this version"):
        run_sweep(PLAN, tmp_path)
    assert servers.started == []


def test_a_cap_on_running_requests_is_said_before_it_is_measured(
    servers: StartedServers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 8: SGLang caps running requests in silence; the fakes say 32."""
    run_sweep(make_plan("cpu-tiny", concurrencies=[1, 64], thresholds=[4], workers=["v1"], repeats=1), tmp_path)
    assert "server v1 runs at most 32 requests at once, the sweep asks for 64: above, they wait" in caplog.text
    caplog.clear()
    run_sweep(PLAN, tmp_path / "within")
    assert "at most" not in caplog.text


def test_plan_is_written_before_a_server_starts(servers: StartedServers, tmp_path: Path) -> None:
    seen: list[SweepPlan] = []
    servers.refuse = lambda _: seen.append(read_plan(tmp_path)[1])  # type: ignore[func-returns-value]
    run_sweep(PLAN, tmp_path)
    assert seen[0] == PLAN


def test_status_names_the_server_that_is_starting(servers: StartedServers, tmp_path: Path) -> None:
    seen: list[str | None] = []

    def look(_: Any) -> None:
        seen.append(read_status(tmp_path).now)

    servers.refuse = look
    run_sweep(PLAN, tmp_path)
    assert seen == ["starting server baseline", "starting server v1", "starting server v2"]
    assert read_status(tmp_path).now is None


def test_the_start_of_servers_is_no_part_of_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left_s: list[float | None] = []

    def run_cell(server: FakeServer, prompts: Any, concurrency: int, output_tokens: int, *_: Any) -> Measured:
        left_s.append(read_status(tmp_path).seconds_left)
        return measured(prompts, concurrency, output_tokens)

    servers = fake_servers(monkeypatch, run_cell)
    servers.refuse = lambda plan: time.sleep(1.0)
    run_sweep(PLAN, tmp_path)
    assert left_s[0] is None
    assert left_s[1] is not None
    assert left_s[1] < 1.5 * (len(ALL) - 1)  # else the start of three servers, 3 s, would count for every cell


def test_another_release_is_refused(servers: StartedServers, tmp_path: Path) -> None:
    plan = PLAN.model_copy(update={"sglang": "0.5.99"})
    with pytest.raises(ValueError, match=r"the plan is for SGLang 0\.5\.99, this environment has"):
        run_sweep(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_changed_prompts_are_refused(servers: StartedServers, tmp_path: Path) -> None:
    """Case 15: prompts decide what speculation is worth; a run has one set of them."""
    plan = PLAN.model_copy(update={"prompt_set_sha256": "0" * 64})
    with pytest.raises(ValueError, match="is not the one that was planned with"):
        run_sweep(plan, tmp_path / "out")


def test_two_runs_into_one_folder_are_refused(servers: StartedServers, tmp_path: Path) -> None:
    with folder_lock(tmp_path), pytest.raises(ValueError, match=f"in use by process {os.getpid()} on "):
        run_sweep(PLAN, tmp_path)
    assert len(run_sweep(PLAN, tmp_path)) == len(ALL)


def test_asking_for_the_status_does_not_keep_a_run_from_starting(servers: StartedServers, tmp_path: Path) -> None:
    """To ask takes the lock of a folder that nobody holds, for an instant."""
    run_sweep(PLAN, tmp_path)
    path = tmp_path / "status.json"
    path.write_text(path.read_text().replace('"done"', '"running"'))
    asking = threading.Event()

    def ask() -> None:
        while not asking.is_set():
            read_status(tmp_path)

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    try:
        for _ in range(200):
            with folder_lock(tmp_path):
                pass
    finally:
        asking.set()
        for asker in askers:
            asker.join()


# Processes


@contextlib.contextmanager
def sweep_process(out: Path, cell_s: float) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(HERE / "sweep_fakes.py"), str(cell_s), "sweep", str(out), *SWEEP_ARGUMENTS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_cells(out: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while len(list((out / "cells").glob("*.json"))) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_kill_9_in_the_middle_and_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Case 18: done cells stay, byte for byte."""
    out = tmp_path / "out"
    with sweep_process(out, cell_s=0.3) as process:
        wait_for_cells(out, 2, process)
        status = read_status(out)
        assert (status.state, status.pid, status.cells_total) == ("running", process.pid, len(ALL))
        with pytest.raises(ValueError, match=f"in use by process {process.pid}"):
            run_sweep(PLAN, out)
        process.kill()
        process.wait()
    assert read_status(out).state == "killed"
    before = {path.name: path.read_bytes() for path in (out / "cells").glob("*.json")}
    assert 2 <= len(before) < len(ALL)
    fake_servers(monkeypatch)
    frame = run_sweep(PLAN, out)
    assert set(frame["cell_id"]) == ALL
    assert frame["run_id"].nunique() == 1
    assert {name: (out / "cells" / name).read_bytes() for name in before} == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_command_with_one_line_and_rows_kept(tmp_path: Path, number: signal.Signals) -> None:
    """Case 17: at the terminal and from a scheduler."""
    out = tmp_path / "out"
    with sweep_process(out, cell_s=0.3) as process:
        wait_for_cells(out, 1, process)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted; what is measured is kept" in errors
    assert "Traceback" not in errors
    assert read_status(out).state == "interrupted"
    assert len(read_results(out)) == len(list((out / "cells").glob("*.json"))) >= 1


@pytest.fixture
def specdec(monkeypatch: pytest.MonkeyPatch, servers: StartedServers) -> Callable[..., int]:
    """Runs `specdec ARGUMENTS` in this process; its exit code."""
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["specdec", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0)

    return run


def test_command_line_sweep_and_status(
    specdec: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert specdec("sweep", out, *SWEEP_ARGUMENTS) == 0
    assert capsys.readouterr().out == f"{len(ALL)} cells in {out}/results.parquet, 0 failed\n"
    assert specdec("status", out) == 0
    assert capsys.readouterr().out.startswith(f"{out}: done, {len(ALL)} of {len(ALL)} cells, 0 failed\n")


def test_command_line_says_that_cells_failed(
    specdec: Callable[..., int], servers: StartedServers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers.refuse = lambda plan: ServerDied("no memory") if plan.worker == "v2" else None
    assert specdec("sweep", str(tmp_path), *SWEEP_ARGUMENTS) == 1
    assert "10 cells in" in (output := capsys.readouterr()).out
    assert "4 failed" in output.out
    assert "--retry-failed" in output.err


def test_a_run_of_the_notebooks_says_that_cells_failed(
    specdec: Callable[..., int],
    servers: StartedServers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run_suite(asked: Any, say: Any) -> Path:
        run_sweep(PLAN, tmp_path)
        return tmp_path / "report.html"

    monkeypatch.setattr("specdec.notebooks.run_suite", run_suite)
    servers.refuse = lambda plan: ServerDied("no memory") if plan.worker == "v2" else None
    assert specdec("run", "--out", str(tmp_path)) == 1
    said = capsys.readouterr()
    assert "report.html" in said.out
    assert "4 cells failed" in said.err
    assert f"specdec sweep {tmp_path} --retry-failed" in said.err
    servers.refuse = lambda plan: None
    assert specdec("sweep", str(tmp_path), "--retry-failed", *SWEEP_ARGUMENTS) == 0
    assert specdec("run", "--out", str(tmp_path)) == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["sweep", "OUT", "--thresholds=-1"], "thresholds must be integers of 0 or more, got -1"),
        (["sweep", "OUT", "--thresholds=4;8"], "thresholds must be integers separated by commas, got '4;8'"),
        (["sweep", "OUT", "--profile=nope"], "no profile 'nope'"),
        (["status", "OUT"], "holds no run"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    specdec: Callable[..., int],
    servers: StartedServers,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    out = tmp_path / "out"
    assert specdec(*[str(out) if argument == "OUT" else argument for argument in arguments]) == 2
    errors = capsys.readouterr().err
    assert reason in errors
    assert len(errors.strip().splitlines()) == 1
    assert not out.exists()
    assert servers.started == []


def test_status_file_is_json_for_other_programs(servers: StartedServers, tmp_path: Path) -> None:
    run_sweep(PLAN, tmp_path)
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["cells_done"], status["cells_failed"]) == ("done", len(ALL), 0)
