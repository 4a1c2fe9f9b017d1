"""Sweeps over fake servers: `fake_servers` patches them in a test; as a script, one for tests that kill it.

`python sweep_fakes.py CELL_S ARGS...` runs `specdec ARGS...` with cells that take CELL_S seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import Behaviour, FakeServer

from specdec.load.cell import Measured
from specdec.runs import arm_servers, sweep
from specdec.servers.server import ServerPlan


class StartedServers:
    """Stands in for the class Server in arm_servers: starts fakes and remembers them."""

    def __init__(self) -> None:
        self.started: list[FakeServer] = []
        self.behaviour = Behaviour()
        self.refuse: Callable[[ServerPlan], Exception | None] = lambda plan: None

    def start(self, plan: ServerPlan, log_dir: Path, timeout_s: float) -> FakeServer:
        if error := self.refuse(plan):
            raise error
        server = FakeServer(self.behaviour, plan)
        self.started.append(server)
        return server

    def up(self) -> list[str]:
        return [server.plan.name for server in self.started if server.running()]


def measured(prompts: Sequence[Any], concurrency: int, tokens_each: int, **changes: Any) -> Measured:
    """A cell that went well, but for `changes`."""
    tokens = len(prompts) * tokens_each
    columns: dict[str, Any] = {
        **{"duration_s": 2.0, "input_tokens": 7, "output_tokens": tokens, "output_tok_s": tokens / 2},
        **{
            "total_tok_s": (tokens + 7) / 2,
            "requests_per_s": len(prompts) / 2,
            "goodput_requests_per_s": None,
        },
        **{f"{name}_ms_p{p}": 1.0 for name in ("ttft", "tpot", "e2e") for p in (50, 90, 99)},
        **{"achieved_batch_mean": float(concurrency), "achieved_batch_peak": concurrency},
        **{"accept_length": None, "speculative_steps": None, "plain_steps": None, "plain_step_share": None},
        **{"switches_off": None, "switches_on": None, "error": None},
    }
    return Measured(**columns | changes)


def fake_servers(monkeypatch: pytest.MonkeyPatch, run_cell: Callable[..., Measured] | None = None) -> StartedServers:
    """Sweeps start fakes and measure nothing; `run_cell` replaces the measurement of a cell."""

    def at_once(server: Any, prompts: Any, concurrency: int, output_tokens: int, *_: Any) -> Measured:
        return measured(prompts, concurrency, output_tokens)

    servers = StartedServers()
    monkeypatch.setattr(arm_servers, "Server", servers)
    monkeypatch.setattr(arm_servers, "warm_up", lambda *_: None)
    monkeypatch.setattr(arm_servers, "DEATH_NOTICED_S", 0.1)
    monkeypatch.setattr(sweep, "bench_module", lambda: None)
    monkeypatch.setattr(sweep, "run_cell", run_cell or at_once)
    return servers


if __name__ == "__main__":
    cell_s = float(sys.argv.pop(1))

    def slow_cell(server: Any, prompts: Any, concurrency: int, output_tokens: int, *_: Any) -> Measured:
        time.sleep(cell_s)
        return measured(prompts, concurrency, output_tokens)

    fake_servers(pytest.MonkeyPatch(), slow_cell)
    from specdec.cli import main

    main()
