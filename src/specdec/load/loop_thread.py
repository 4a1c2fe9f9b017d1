"""A client's event loop in a thread of its own, and the watch that ends it when no token comes any more."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from specdec.servers.client import STATE_READ_TIMEOUT_S
from specdec.servers.counters import token_counts
from specdec.servers.server import Server

T = TypeVar("T")
DEFAULT_STALL_S = 120.0  # longer than any prefill or pause that a healthy server makes


class CellError(Exception):
    """The load did not run to its end (one line). The server may still hold requests: get a fresh one."""


def run_in_thread(main: Callable[[], Coroutine[Any, Any, T]], watch: Callable[[], None], join_s: float = 5.0) -> T:
    """Run a coroutine in an event loop of its own thread: a notebook's thread already runs one.

    `watch` is called about once a second from here. What it raises, and KeyboardInterrupt, cancels the
    coroutine and is raised. A thread still stuck in a blocking call after `join_s` is left behind (daemon):
    such a call ends with the server.
    """
    loop = asyncio.new_event_loop()
    task: asyncio.Task[T] = loop.create_task(main())
    outcome: Future[T] = Future()

    def work() -> None:
        asyncio.set_event_loop(loop)
        try:
            outcome.set_result(loop.run_until_complete(task))
        except BaseException as error:
            outcome.set_exception(error)
        finally:
            _end_loop(loop)

    thread = threading.Thread(target=work, name="specdec-load", daemon=True)
    thread.start()
    try:
        while not wait([outcome], timeout=1.0).done:
            watch()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
            loop.call_soon_threadsafe(task.cancel)
        thread.join(join_s)
        raise
    return outcome.result()


def _end_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what still runs in the loop and close it, as asyncio.run does."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


class StallWatch:
    """Raises CellError if neither requests end nor the server steps for `stall_s`, ServerDied if it ended.

    The server is asked only if no request has ended for a quarter of `stall_s`: asking takes its time. So
    does a hung server that never answers: it gets a quarter of `stall_s`, and the stall is seen before twice
    `stall_s`.
    """

    def __init__(self, server: Server, requests_done: Callable[[], int], stall_s: float) -> None:
        self._server = server
        self._requests_done = requests_done
        self._stall_s = stall_s
        self._progress: tuple[int, int | None] = (0, None)
        self._moved_s = self._looked_s = time.monotonic()

    def __call__(self) -> None:
        done, now = self._requests_done(), time.monotonic()
        if done != self._progress[0]:
            self._progress = (done, None)
            self._moved_s = self._looked_s = now
        if now - self._looked_s < self._stall_s / 4:
            return
        steps = self._steps()
        now = self._looked_s = time.monotonic()
        if steps is not None and steps != self._progress[1]:
            if self._progress[1] is not None:
                self._moved_s = now
            self._progress = (done, steps)
        if now - self._moved_s > self._stall_s:
            raise stalled(self._server, self._stall_s)

    def _steps(self) -> int | None:
        """Decode steps so far, without the plugin finished tokens; None if the server does not answer."""
        try:
            state = self._server.state(timeout_s=min(STATE_READ_TIMEOUT_S, self._stall_s / 4))
            if state is None:
                return token_counts(self._server.url)[1]
            return sum(int(count) for count in state["steps_by_batch_size"].values())
        except OSError:  # ConnectionError among them; ServerDied goes up
            return None


def stalled(server: Server, stall_s: float) -> CellError:
    """The error of a stall; says whether the server still calls itself healthy."""
    health = "answers 200" if server.health() else "does not answer"
    return CellError(f"stalled: no token for {stall_s:g} s; /health {health}")
