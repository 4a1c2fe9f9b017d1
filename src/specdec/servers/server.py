"""The life of one SGLang server: start, wait until ready, stop all of it. Talking to it: client.py.

Usable as a context manager and from a notebook: `with Server.start(plan, log_dir) as server: ...`. The server
belongs to a supervising process (supervise.py) that ends it when this process ends in any way, kill -9
included.
"""

from __future__ import annotations

import atexit
import os
import random
import re
import shlex
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from tqdm.auto import tqdm

from specdec.servers.client import STATE_READ_TIMEOUT_S, ServerClient
from specdec.servers.supervise import end_processes, is_alive, session_processes, tree_processes

PORT_PLACEHOLDER = "{port}"
# Below 32768, where Linux hands out ephemeral ports: SGLang's own sockets take those and can collide with a
# server port picked among them.
PORT_RANGE = range(20000, 30000)
START_ATTEMPTS = 3
STOP_GRACE_S = 5.0
_PORT_TAKEN = re.compile(r"address already in use|EADDRINUSE|port is already in use|errno 98", re.IGNORECASE)


class ServerDied(Exception):  # noqa: N818 - says what happened
    """The server ended by itself; the message holds its last log lines."""


class ServerNotReady(ServerDied):
    """The server lived but did not answer in time, and was stopped. The message holds its last log lines."""


@dataclass(frozen=True)
class ServerPlan:
    """What to start.

    `arm`: "baseline" | "static" | "dynamic" | "off" | "adaptive"; `worker`: "none" for the baseline, else a
    worker of the profile ("v1", "v2"). `command`: an argv that names the port as "{port}"; `env` is added to
    this process's own. `cwd`: where relative paths in `command` start ("" = this process's folder).
    """

    arm: str
    worker: str
    command: list[str]
    env: dict[str, str]
    cwd: str = ""
    tier_threshold: int | None = None  # of an adaptive server whose tiers stand for a threshold

    @property
    def flags(self) -> list[str]:
        """The server's flags: the command without interpreter and module."""
        return self.command[3:]

    @property
    def name(self) -> str:
        """Short, unique within a sweep: "baseline", "v1", "v2-adaptive", "v2-adaptive4"."""
        if self.worker == "none":
            return self.arm
        if self.arm != "adaptive":
            return self.worker
        return f"{self.worker}-adaptive{'' if self.tier_threshold is None else self.tier_threshold}"


class Server(ServerClient):
    """A server of ours. Made by `Server.start`; ends with `stop`, the with-block, or this process."""

    def __init__(self, plan: ServerPlan, port: int, log_path: Path) -> None:
        super().__init__(f"http://127.0.0.1:{port}")
        self.plan = plan
        self.port = port
        self.log_path = log_path
        self._stopped = False
        self._supervisor, self.pid = _spawn(plan, port, log_path)
        self._created_at = _created_at(self.pid)
        atexit.register(self.stop)

    @classmethod
    def start(cls, plan: ServerPlan, log_dir: str | Path, timeout_s: float = 600.0) -> Server:
        """Start `plan` on a free port and wait until it serves; its log goes to a new file in `log_dir`.

        Raises ServerDied, or ServerNotReady after `timeout_s`, with the last log lines; nothing is left
        running then. A port that somebody takes between pick and bind is retried with another one.
        """
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        for attempt in range(1, START_ATTEMPTS + 1):
            server = cls(plan, pick_port(), _new_log(Path(log_dir), plan.name))
            try:
                server._wait_until_ready(timeout_s)
            except BaseException as error:
                server.stop()
                port_taken = isinstance(error, ServerDied) and _PORT_TAKEN.search(server.log_tail(200))
                if port_taken and attempt < START_ATTEMPTS:
                    continue
                raise
            return server
        raise AssertionError("unreachable: the last attempt returns or raises")

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # Life

    def running(self) -> bool:
        """True while the server's first process lives (it may still be hung: see `health`)."""
        return self._supervisor.poll() is None

    def stop(self) -> None:
        """End every process of the server and check that none is left. May be called again, and after its
        death.

        Raises RuntimeError with the pids if some process cannot be ended even by SIGKILL.
        """
        if self._stopped:
            return
        known = self.processes()
        # A second Ctrl-C in here does no harm: the supervisor goes on by itself, and atexit calls this again.
        if self.running():
            self._supervisor.terminate()
            try:
                self._supervisor.wait(STOP_GRACE_S + 15.0)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()
                self._supervisor.wait()
        left = end_processes(lambda: known + self.processes(), grace_s=0.0)
        if left:
            raise RuntimeError(f"processes of server {self.plan.name} could not be ended: {left}")
        self._stopped = True
        atexit.unregister(self.stop)

    def processes(self) -> list[psutil.Process]:
        """The server's living processes: launcher, schedulers, detokenizer, and what those started."""
        found = tree_processes(self._supervisor.pid) if self.running() else []
        # After the server's end its pid can be another program's; while its session lives, it cannot.
        if self.pid and _created_at(self.pid) in (self._created_at, None):
            found += session_processes(self.pid)
        return [process for process in set(found) if is_alive(process)]

    def log_tail(self, n: int = 20) -> str:
        """The last `n` lines of the log that are not blank."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - 200_000))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join([line for line in lines if line.strip()][-n:])

    def health(self) -> bool:
        """True if GET /health answers 200; False also for a server that has ended."""
        return self.running() and super().health()

    def _request(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = STATE_READ_TIMEOUT_S) -> str:
        """As ServerClient, but ServerDied (with the last log lines) where the server has ended."""
        try:
            return super()._request(path, body, timeout_s)
        except ConnectionError:
            if self.running():
                raise
            raise self._died("ended") from None

    # Start

    def _wait_until_ready(self, timeout_s: float) -> None:
        """Until /health answers and the state can be read; shows time and last log line meanwhile."""
        deadline = time.monotonic() + timeout_s
        # Terminal and notebook show a moving line; a pipe or file gets none (disable=None).
        with tqdm(bar_format="{desc} [{elapsed}]", leave=False, disable=None) as waiting:
            while self.running():
                last_line = self.log_tail(1)[-60:]
                waiting.set_description_str(f"starting server {self.plan.name}, port {self.port}: {last_line}")
                try:
                    self._request("/health")
                    self.info()
                    if self._owns_port():
                        return
                    not_yet = "another program answers on its port"
                except ConnectionError as error:
                    not_yet = str(error)
                if time.monotonic() > deadline:
                    raise ServerNotReady(
                        f"server {self.plan.name} not ready after {timeout_s:g} s ({not_yet}); "
                        f"log {self.log_path}:\n{self.log_tail()}"
                    )
                time.sleep(0.25)
        raise self._died("ended before it was ready")

    def _owns_port(self) -> bool:
        """Whether it is this server that answers, not one that took the port between pick and bind."""
        for process in self.processes():
            try:
                connections = process.net_connections("tcp")
            except psutil.NoSuchProcess:
                continue
            if any(one.status == psutil.CONN_LISTEN and one.laddr.port == self.port for one in connections):
                return True
        return False

    def _died(self, what: str) -> ServerDied:
        status = self._supervisor.poll()
        return ServerDied(
            f"server {self.plan.name} {what} (exit status {status}); log {self.log_path}:\n{self.log_tail()}"
        )


def pick_port() -> int:
    """A port of PORT_RANGE that nobody listens on now."""
    for port in random.SystemRandom().sample(PORT_RANGE, 100):
        with socket.socket() as probe:
            # As the server's own listener does: a TIME_WAIT of an earlier server does not make a port busy.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port among 100 tried in {PORT_RANGE.start}-{PORT_RANGE.stop - 1}")


def _spawn(plan: ServerPlan, port: int, log_path: Path) -> tuple[subprocess.Popen[str], int]:
    """Start the supervisor and through it the server. Returns it and the server's pid, 0 if that could not be
    run.
    """
    command = [argument.replace(PORT_PLACEHOLDER, str(port)) for argument in plan.command]
    supervise = [sys.executable, "-m", "specdec.servers.supervise", str(os.getpid()), str(log_path.resolve())]
    supervise.append(str(STOP_GRACE_S))
    with log_path.open("a") as log:
        settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in plan.env.items())
        log.write(f"$ {settings} {shlex.join(command)}\n")
        log.flush()
        supervisor = subprocess.Popen(
            [*supervise, "--", *command],
            env={**os.environ, **plan.env},
            cwd=plan.cwd or None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal is for this process, which then calls stop()
        )
    assert supervisor.stdout is not None
    try:
        with supervisor.stdout as pipe:
            return supervisor, int(pipe.readline() or 0)
    except BaseException:  # Ctrl-C here: nobody else knows of this process yet
        supervisor.terminate()
        raise


def _created_at(pid: int) -> float | None:
    """When process `pid` began, which tells it from a later one with the same pid; None if there is none."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return None


def _new_log(log_dir: Path, name: str) -> Path:
    """A log file that did not exist: server-NAME-1.log, server-NAME-2.log after a restart, ..."""
    number = 1
    while True:
        path = log_dir / f"server-{name}-{number}.log"
        try:
            path.touch(exist_ok=False)
            return path
        except FileExistsError:
            number += 1
