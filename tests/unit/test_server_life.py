"""Server life with a fake server: every way to start, fail and end, and that nothing is ever left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from specdec.servers import server as server_module
from specdec.servers.server import PORT_RANGE, Server, ServerDied, ServerNotReady, ServerPlan, pick_port

FAKE = Path(__file__).with_name("fake_server.py")
RUN = f"run-{os.getpid()}"  # tells this test run's processes from those of another


def fake_plan(behaviour: str = "", *more: str) -> ServerPlan:
    command = [sys.executable, str(FAKE), "--port", "{port}", "--behaviour", behaviour, *more]
    return ServerPlan(arm="static", worker="v1", command=command, env={"FAKE_RUN": RUN})


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No server, child of a server or supervisor outlives a test."""
    yield
    left = fakes()
    for process in left:
        process.kill()
    assert not left


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STOP_GRACE_S", 0.3)


def fakes() -> list[psutil.Process]:
    """Processes of this test run, by their environment: children inherit it, the dead have none."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FAKE_RUN") == RUN:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for(condition: Callable[[], bool], timeout_s: float = 15.0) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_with_block_serves_and_leaves_nothing(tmp_path: Path) -> None:
    with Server.start(fake_plan(), tmp_path, timeout_s=20) as server:
        assert server.running()
        assert server.port in PORT_RANGE
        assert server.info()["version"] == "fake"
        assert server.state() == {"threshold": None, "resume_threshold": None, "dwell_steps": 1}
        server.flush_cache()
        assert [process.pid for process in server.processes()] == [server.pid]
        assert f"pid {server.pid} run {RUN}" in server.log_tail()
    assert not server.running()
    assert port_is_free(server.port)
    assert server.processes() == []


def test_exception_in_block_ends_the_server(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Server.start(fake_plan(), tmp_path, timeout_s=20) as server:
        _ = 1 / 0
    assert not server.running()


def test_stop_twice_and_after_death(tmp_path: Path) -> None:
    server = Server.start(fake_plan(), tmp_path, timeout_s=20)
    psutil.Process(server.pid).kill()
    assert wait_for(lambda: not server.running())
    server.stop()
    server.stop()


def test_threshold_is_set_live_and_refusal_says_why(tmp_path: Path) -> None:
    with Server.start(fake_plan(), tmp_path, timeout_s=20) as server:
        server.set_threshold(8, resume_threshold=6, dwell_steps=3)
        assert server.state() == {"threshold": 8, "resume_threshold": 6, "dwell_steps": 3}
        server.set_threshold(None)
        state = server.state()
        assert state is not None
        assert state["threshold"] is None
        with pytest.raises(ValueError, match=r"refused .*: the threshold must be 0 or more"):
            server.set_threshold(-1)
        assert (server.state() or {})["threshold"] is None


def test_death_at_start_shows_the_log(tmp_path: Path) -> None:
    with pytest.raises(ServerDied, match=r"exit status 7(?s:.)*the draft model does not fit"):
        Server.start(fake_plan("dies"), tmp_path, timeout_s=20)


def test_command_that_does_not_exist(tmp_path: Path) -> None:
    plan = ServerPlan("static", "v1", ["/no/such/python", "{port}"], {})
    with pytest.raises(ServerDied, match="cannot start /no/such/python"):
        Server.start(plan, tmp_path, timeout_s=20)


def test_server_that_never_answers_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(ServerNotReady, match=r"not ready after 1 s(?s:.)*loading weights"):
        Server.start(fake_plan("hangs"), tmp_path, timeout_s=1)


def test_death_while_serving_is_told_from_no_answer(tmp_path: Path) -> None:
    with Server.start(fake_plan("crashes"), tmp_path, timeout_s=20) as server:
        with pytest.raises((ServerDied, ConnectionError)):
            server.info()
        assert wait_for(lambda: not server.running())
        with pytest.raises(ServerDied, match=r"exit status 3(?s:.)*out of memory in decode"):
            server.info()


def test_taken_port_is_retried_on_another(tmp_path: Path) -> None:
    """Case 23: a port that somebody took between pick and bind."""
    with Server.start(fake_plan("port-taken", "--marker", str(tmp_path / "once")), tmp_path) as server:
        assert server.log_path.name == "server-v1-2.log"
    assert "address already in use" in (tmp_path / "server-v1-1.log").read_text()


def test_another_program_on_the_port_is_not_taken_for_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server.start(fake_plan(), tmp_path, timeout_s=20) as other:
        monkeypatch.setattr(server_module, "pick_port", lambda: other.port)
        with pytest.raises(ServerNotReady, match="another program answers on its port"):
            Server.start(fake_plan("hangs"), tmp_path, timeout_s=1)


def test_picked_port_is_below_the_ephemeral_ones_and_free() -> None:
    """Case 23."""
    ephemeral_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with socket.socket() as taken:
        port = pick_port()
        assert port < ephemeral_from
        taken.bind(("127.0.0.1", port))


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("behaviour", ["stubborn", "forks"])
def test_sigterm_ignored_and_children_elsewhere(tmp_path: Path, behaviour: str) -> None:
    with Server.start(fake_plan(behaviour), tmp_path, timeout_s=20) as server:
        assert len(server.processes()) == 3
    assert fakes() == []


@pytest.mark.usefixtures("short_grace")
def test_killed_supervisor_takes_the_server_along(tmp_path: Path) -> None:
    """What the supervisor can no longer end: its server dies by itself, the session's others are found by
    stop.
    """
    with Server.start(fake_plan("stubborn"), tmp_path, timeout_s=20) as server:
        supervisor = psutil.Process(server.pid).parent()
        assert supervisor is not None
        others = [process for process in server.processes() if process.pid != server.pid]
        elsewhere = next(process for process in others if os.getsid(process.pid) == process.pid)
        supervisor.kill()
        assert wait_for(lambda: not server.running())
    # In a session of its own and an orphan: nobody can tell whose it was.
    elsewhere.kill()
    elsewhere.wait(5)


def test_start_from_a_thread_that_ends(tmp_path: Path) -> None:
    """PR_SET_PDEATHSIG goes by the forking thread; a server must not die with the thread that started it."""
    started: list[Server] = []
    thread = threading.Thread(target=lambda: started.append(Server.start(fake_plan(), tmp_path, timeout_s=20)))
    thread.start()
    thread.join()
    time.sleep(0.5)
    with started[0] as server:
        assert server.health()


OWNER = """
import signal, sys, time
sys.path.insert(0, {tests!r})
import test_server_life
test_server_life.RUN = {run!r}
from specdec.servers.server import Server
{first}
server = Server.start(test_server_life.fake_plan({behaviour!r}), {logs!r}, timeout_s=20)
print(server.pid, server.port, flush=True)
{then}
"""


def owner_code(tmp_path: Path, behaviour: str, first: str = "", then: str = "") -> str:
    where = {"tests": str(FAKE.parent), "logs": str(tmp_path), "run": RUN}
    return OWNER.format(**where, behaviour=behaviour, first=first, then=then)


def start_owner(
    tmp_path: Path, behaviour: str = "", first: str = "", then: str = "time.sleep(600)"
) -> tuple[subprocess.Popen[str], int]:
    """A Python process that owns a server, as a notebook kernel does; and the server's port."""
    code = owner_code(tmp_path, behaviour, first, then)
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert owner.stdout is not None
    with owner.stdout as pipe:
        _pid, port = pipe.readline().split()
    return owner, int(port)


@pytest.mark.parametrize(
    ("ending", "behaviour"),
    [
        (signal.SIGKILL, ""),
        (signal.SIGTERM, ""),
        (signal.SIGINT, ""),
        (signal.SIGHUP, ""),
        (signal.SIGKILL, "stubborn"),
    ],
)
def test_signal_to_the_owner_ends_the_server(tmp_path: Path, ending: signal.Signals, behaviour: str) -> None:
    """Case 17: however its owner ends, no process and no port is left."""
    owner, port = start_owner(tmp_path, behaviour)
    owner.send_signal(ending)
    owner.wait(30)
    assert wait_for(lambda: port_is_free(port) and not fakes())


def test_interrupt_of_another_cell_leaves_the_server_alone(tmp_path: Path) -> None:
    """Jupyter's interrupt goes to the kernel's whole process group; only the kernel decides what ends."""
    handled = "signal.signal(signal.SIGINT, lambda number, frame: None)"
    owner, port = start_owner(tmp_path, first=handled, then="while True: time.sleep(1)")
    os.killpg(owner.pid, signal.SIGINT)
    time.sleep(1.0)
    assert not port_is_free(port)
    owner.kill()
    owner.wait()
    assert wait_for(lambda: port_is_free(port) and not fakes())


def test_kill_of_the_owner_while_the_server_starts(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", owner_code(tmp_path, "hangs")], stdout=subprocess.DEVNULL)
    assert wait_for(lambda: len(fakes()) == 2)
    owner.kill()
    owner.wait()
    assert wait_for(lambda: not fakes())


@pytest.mark.parametrize("then", ["", "raise SystemExit(3)", "1 / 0"])
def test_owner_that_forgets_to_stop(tmp_path: Path, then: str) -> None:
    owner, port = start_owner(tmp_path, then=then)
    owner.wait(30)
    assert port_is_free(port)
    assert fakes() == []


def test_interrupt_while_the_server_starts(tmp_path: Path) -> None:
    """Ctrl-C in the cell that starts a server."""
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        Server.start(fake_plan("hangs"), tmp_path, timeout_s=20)
    assert fakes() == []
