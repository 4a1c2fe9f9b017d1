"""Which worker each server of a plan will run, and the same from servers that do run."""

from __future__ import annotations

import os
from pathlib import Path

from specdec.load.closed_loop import warm_up
from specdec.load.prompts import read_prompts
from specdec.runs.plan import SweepPlan
from specdec.servers.profile import locate, plan_server
from specdec.servers.server import PORT_PLACEHOLDER, Server
from specdec.worker_path import check_live, predict, render, render_live


def predicted(plan: SweepPlan) -> str:
    """The worker path of each worker's server command, with the reasons; nothing is started."""
    parts = []
    for worker in plan.workers:
        server = plan_server(plan.profile, "static", worker, plan.sglang)
        # A notebook does not run in the server's folder, and no port is taken yet.
        flags = [locate(flag.replace(PORT_PLACEHOLDER, "30000")) for flag in server.flags]
        path = predict(flags, {**os.environ, **server.env}, plan.sglang, load=plan.concurrencies[-1])
        parts.append(f"Worker {worker}\n{render(path)}")
    return "\n\n".join(parts)


def proven(plan: SweepPlan, out: Path) -> str:
    """Start each worker's server, let it make steps of both kinds, and hold what it reports against the
    rules.

    The threshold is set to 1, then one request runs alone and two run together: speculative and plain steps.
    Raises ValueError if a server runs something else than predicted, ServerDied if one does not start.
    """
    prompts = read_prompts(locate(plan.profile.prompts)).pick(2, "path")
    parts = []
    for worker in plan.workers:
        server_plan = plan_server(plan.profile, "dynamic", worker, plan.sglang)
        with Server.start(server_plan, out / "logs", plan.profile.start_timeout_s) as server:
            server.set_threshold(1)
            warm_up(server, (1, 2), prompts)
            check = check_live(server.url)
        if check.differences or not check.switch_acts:
            raise ValueError(f"worker {worker}: {'; '.join(check.differences) or check.switch_reason}")
        parts.append(f"Worker {worker}\n{render_live(check).replace(server.url, 'The server')}")
    return "\n\n".join(parts)
