"""A stand-in for the module `ray` whose tasks run in this process, one step of one task at a time."""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(f"ray::task()\n  many lines\n{cause}")
        self.cause = cause


class Stream:
    """What a generator task returns: `next` gives a reference, to be read with `FakeRay.get`."""

    def __init__(self, name: str, results: Iterator[Any], steps: int | None) -> None:
        self.name = name
        self._results = results
        self._steps_left = steps

    def __next__(self) -> Any:
        if self._steps_left == 0:
            self.end()
            return RayError("The worker died unexpectedly.\nSee its log.")
        self._steps_left = None if self._steps_left is None else self._steps_left - 1
        try:
            return next(self._results)
        except StopIteration:
            raise
        except Exception as error:
            return RayTaskError(error)

    def end(self) -> None:
        """As the death of its process: what it has begun ends with it."""
        self._results.close()  # type: ignore[attr-defined]

    def completed(self) -> str:
        return f"{self.name} completed"


class FakeRay:
    """One machine with `gpus`. `dies[task]`: after how many steps each task of that name in turn dies (None: not)."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self) -> None:
        self.gpus = 0
        self.dies: dict[str, list[int | None]] = defaultdict(list)
        self.interrupt_at_step: int | None = None
        self.tasks: list[str] = []
        self.options: dict[str, Any] = {}
        self.calls: list[str] = []
        self._steps = 0

    def init(self, address: str, **_: Any) -> None:
        self.calls.append(f"init {address}")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it does set a handler of its own

    def nodes(self) -> list[dict[str, Any]]:
        gone = {"Alive": False, "Resources": {"GPU": 99.0}}
        return [gone, {"Alive": True, "Resources": {"CPU": 2.0} | ({"GPU": float(self.gpus)} if self.gpus else {})}]

    def remote(self, **options: Any) -> Callable[[Callable[..., Iterator[Any]]], Any]:
        self.options = options

        def named(function: Callable[..., Iterator[Any]], name: str) -> Any:
            def start(*arguments: Any) -> Stream:
                json.dumps(arguments)  # readable on a machine that lacks what the task needs
                self.tasks.append(name)
                return Stream(name, function(*arguments), self.dies[name].pop(0) if self.dies[name] else None)

            return SimpleNamespace(remote=start)

        return lambda function: SimpleNamespace(options=lambda name: named(function, name))

    def wait(self, items: list[Any], num_returns: int, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        """The streams take turns."""
        if isinstance(items[0], str):
            self.calls.append(f"wait for {', '.join(items)}")
            return items, []
        self._steps += 1
        if self._steps == self.interrupt_at_step:
            raise KeyboardInterrupt
        return [items[self._steps % len(items)]], []

    def get(self, result: Any) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    def cancel(self, stream: Stream) -> None:
        self.calls.append(f"cancel {stream.name}")
        stream.end()

    def shutdown(self) -> None:
        self.calls.append("shutdown")
