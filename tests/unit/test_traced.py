"""A traced server: the one of its worker, told where to write its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.runs.plan import make_plan
from specdec.runs.step_trace import TRACE_VARIABLE
from specdec.runs.traced import traced_server
from specdec.servers.server import Server, ServerPlan


@pytest.mark.parametrize(("worker", "arm"), [("none", "baseline"), ("v1", "dynamic")])
def test_the_server_writes_where_its_trace_is_read(
    worker: str, arm: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[ServerPlan] = []

    @contextlib.contextmanager
    def start(plan: ServerPlan, logs: Path, timeout_s: float) -> Iterator[str]:
        assert (logs, timeout_s) == (tmp_path / "logs", 600.0)
        Path(plan.env[TRACE_VARIABLE]).write_text("a step\n")
        started.append(plan)
        yield "server"

    monkeypatch.setattr(Server, "start", start)
    with traced_server(make_plan("cpu-tiny", sglang="0.5.12"), worker, tmp_path) as (server, trace):
        assert server == "server"
        assert trace.read_text() == "a step\n"
    assert not trace.exists()
    (plan,) = started
    assert (plan.arm, plan.worker) == (arm, worker)
    assert ("--speculative-disable-batch-threshold" in plan.command) == (worker != "none")
