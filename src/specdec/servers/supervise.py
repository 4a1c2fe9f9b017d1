"""A small process that owns one server and ends it, however its own parent ends.

`python -m specdec.servers.supervise PARENT_PID LOG_FILE GRACE_S -- SERVER_COMMAND...` writes the server's pid to
stdout, then waits until the server exits, the parent is gone (kill -9 included), or SIGTERM, SIGINT, SIGHUP
or SIGQUIT arrives; in each case it leaves no process of the server behind. It exits with the server's status.

Why a process of its own: SGLang's launcher dies with nobody, a server in a new session outlives Ctrl-C, and
PR_SET_PDEATHSIG goes by the *thread* that forked, so it cannot be set from a notebook's or a sweep's worker
thread. Here the forking thread is the main thread of a process that does nothing else. Linux only (prctl).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
PARENT_POLL_S = 0.5
# SIGQUIT: a dying SGLang scheduler sends it to its parent, which is this process once the launcher is gone.
ENDING_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_libc = ctypes.CDLL(None, use_errno=True)


def tree_processes(pid: int) -> list[psutil.Process]:
    """The descendants of process `pid`, also those that made a session of their own."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def session_processes(session_id: int) -> list[psutil.Process]:
    """The processes of one session, also those whose parent is gone."""
    found = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == session_id:
                found.append(psutil.Process(pid))
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    return found


def is_alive(process: psutil.Process) -> bool:
    """False for a zombie and for a pid that has gone to another process."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end_processes(find: Callable[[], list[psutil.Process]], grace_s: float, timeout_s: float = 10.0) -> list[int]:
    """SIGTERM to all that `find` lists, SIGKILL from `grace_s` on; the pids that still live `timeout_s` after
    that.

    Looks again in every round: a process can fork between the listing and the signal.
    """
    _signal_all(find(), signal.SIGTERM)
    kill_from = time.monotonic() + grace_s
    while remaining := [process for process in find() if is_alive(process)]:
        now = time.monotonic()
        if now >= kill_from + timeout_s:
            break
        if now >= kill_from:
            _signal_all(remaining, signal.SIGKILL)
        time.sleep(0.05)
    return sorted(process.pid for process in remaining)


def _signal_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _prepare_server() -> None:
    """In the forked child: die with the supervisor; undo its signal mask."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def supervise(parent_pid: int, log_path: str, grace_s: float, command: list[str]) -> int:
    """Run `command` with its output appended to `log_path` until it ends or must end.

    Returns its exit status, 128 + signal for a death by signal or an end from here, 127 if it could not be
    run.
    """
    waited_for = ENDING_SIGNALS | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with open(log_path, "ab") as log:
        try:
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_prepare_server,
            )
        except OSError as error:
            log.write(f"cannot start {command[0]}: {error}\n".encode())
            return 127
    print(server.pid, flush=True)

    status: int | None = None
    while status is None and os.getppid() == parent_pid:
        arrived = signal.sigtimedwait(waited_for, PARENT_POLL_S)
        if arrived is not None and arrived.si_signo in ENDING_SIGNALS:
            break
        status = server.poll()
    end_processes(lambda: tree_processes(os.getpid()) + session_processes(server.pid), grace_s)
    if status is None:
        return 128 + signal.SIGTERM
    return status if status >= 0 else 128 - status


def main(arguments: list[str]) -> int:
    parent_pid, log_path, grace_s, separator, *command = arguments
    if separator != "--" or not command:
        raise SystemExit("usage: python -m specdec.servers.supervise PARENT_PID LOG_FILE GRACE_S -- COMMAND...")
    return supervise(int(parent_pid), log_path, float(grace_s), command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
