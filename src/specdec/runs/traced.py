"""A server that writes a step trace, for as long as it is needed."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

from specdec.runs.plan import ARM_NONE, SweepPlan
from specdec.runs.step_trace import TRACE_VARIABLE
from specdec.servers.profile import plan_server
from specdec.servers.server import Server


@contextlib.contextmanager
def traced_server(plan: SweepPlan, worker: str, out: str | Path) -> Iterator[tuple[Server, Path]]:
    """The server of `worker` ("none": the baseline's) and the trace file it writes; both are gone afterwards.

    Its log goes to OUT/logs. A step's line is in the file when its tokens are answered; the very last one for
    sure only after `server.stop()`. Raises what `Server.start` raises.
    """
    server_plan = plan_server(plan.profile, "baseline" if worker == ARM_NONE else "dynamic", worker, plan.sglang)
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch) / "trace.jsonl"
        env = {**server_plan.env, TRACE_VARIABLE: str(trace)}
        server_plan = dataclasses.replace(server_plan, env=env)
        with Server.start(server_plan, Path(out) / "logs", plan.profile.start_timeout_s) as server:
            yield server, trace
