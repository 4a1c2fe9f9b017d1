"""The servers of a sweep: the baseline's, one per worker, which serves all thresholds in turn, and those of SGLang's
own switch.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.load.closed_loop import warm_up
from specdec.load.prompts import PromptSet
from specdec.runs.plan import ARM_NONE, Arm, SweepPlan
from specdec.servers.adaptive import AdaptiveTiers
from specdec.servers.profile import ROOT, plan_server
from specdec.servers.server import PORT_PLACEHOLDER, Server

FAILURES_IN_A_ROW = 3  # then a server is not started again
SETTLE_TOKENS = 4
DEATH_NOTICED_S = 2.0
_log = logging.getLogger(__name__)


@dataclass
class ArmServers:
    """Servers by name (`Arm.server`): started when first needed, and again after a failure.

    Side by side they stay up; else one is ended before the next starts.
    """

    plan: SweepPlan
    log_dir: Path
    prompts: PromptSet
    restarts: Counter[str] = field(default_factory=Counter)  # after a failure
    starting: Callable[[str | None], None] = lambda server: None  # told of each start, and of its end by None
    _up: dict[str, Server] = field(default_factory=dict)
    _failures: Counter[str] = field(default_factory=Counter)  # in a row

    def close(self) -> None:
        """End all servers."""
        for name in list(self._up):
            self._up.pop(name).stop()

    def ready(self, arm: Arm) -> Server:
        """The arm's server at the arm's threshold and in its mode for batch size 1, started if it was not up.

        Raises RuntimeError, one line, if it has failed too often, and what Server.start and set_threshold
        raise.
        """
        if self._failures[arm.server] >= FAILURES_IN_A_ROW:
            raise RuntimeError(f"not tried: its server failed {FAILURES_IN_A_ROW} times in a row")
        if arm.server not in self._up:
            self._start(arm)
        server = self._up[arm.server]
        if arm.has_switch:
            server.set_threshold(arm.threshold)
        # The mode follows the threshold at the next decode step: let that be here, not a switch of the cell.
        warm_up(server, [1], self.prompts.prompts[:1], SETTLE_TOKENS)
        return server

    def start_all(self, arms: Iterable[Arm]) -> None:
        """Start the servers of `arms` before a block is measured, where they can stand side by side.

        One that does not start is tried again when a cell needs it.
        """
        if not self.plan.profile.side_by_side:
            return
        for arm in {arm.server: arm for arm in arms}.values():
            try:
                self._start(arm)
            except Exception as error:
                reason, _ = self.failed(arm, error)
                _log.warning("%s", reason)

    def succeeded(self, arm: Arm) -> None:
        """Note that a cell on the arm's server went well."""
        self._failures[arm.server] = 0

    def failed(self, arm: Arm, error: Exception) -> tuple[str, str]:
        """End a server that failed; (what happened, in one line; the last lines of its log)."""
        self._failures[arm.server] += 1
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        server = self._up.pop(arm.server, None)
        if server is None:  # it did not start: the error holds the log
            return reason, str(error)
        if _ends_now(server):
            reason = f"the server ended: {reason}"
        server.stop()
        return reason, server.log_tail()

    def _start(self, arm: Arm) -> None:
        if not self.plan.profile.side_by_side:
            self.close()
        profile = self.plan.profile
        self.restarts[arm.server] += self._failures[arm.server] > 0
        tiers = None
        if arm.arm == "adaptive" and arm.threshold is not None:
            # Servers run in the repository's folder: a path from there on keeps machines' folders out of the results.
            folder = self.log_dir.resolve()
            tiers = AdaptiveTiers(arm.threshold, folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder)
        server_plan = plan_server(profile, arm.arm, arm.worker, self.plan.sglang, tiers)
        self.starting(server_plan.name)
        try:
            server = self._up[arm.server] = Server.start(server_plan, self.log_dir, profile.start_timeout_s)
            self._warn_of_cap(server)
            self._warm_up(server, arm)
        finally:
            self.starting(None)

    def _warm_up(self, server: Server, arm: Arm) -> None:
        """Short requests at the ends of the grid, where there is a switch with speculation on and off."""
        ends = sorted({self.plan.concurrencies[0], self.plan.concurrencies[-1]})
        prompts = self.prompts.pick(ends[-1], f"{self.plan.seed}-warm-up")
        if not arm.has_switch:
            warm_up(server, ends, prompts)
            return
        for threshold in (None, 0):
            server.set_threshold(threshold)
            warm_up(server, ends, prompts)

    def _warn_of_cap(self, server: Server) -> None:
        states = server.info().get("internal_states") or [{}]
        cap = states[0].get("effective_max_running_requests_per_dp")
        most = self.plan.concurrencies[-1]
        if cap is not None and cap < most:
            _log.warning(
                "server %s runs at most %d requests at once, the sweep asks for %d: above, they wait",
                *(server.plan.name, cap, most),
            )


def _ends_now(server: Server) -> bool:
    """Whether it has ended; its first process notices a scheduler's death a moment after the client."""
    deadline = time.monotonic() + DEATH_NOTICED_S
    while server.running() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not server.running()


def describe(server: Server) -> dict[str, Any]:
    """What the server says it is, as columns of a Cell. ValueError if a worker has no switch in force."""
    info = server.info()
    state = (info.get("internal_states") or [{}])[0].get("specdec") or {}
    columns: dict[str, Any] = {
        "sglang": info.get("version"),
        "server_flags": shlex.join(["python", *server.plan.command[1:]]).replace(shlex.quote(PORT_PLACEHOLDER), "PORT"),
        "worker_class": state.get("worker_class"),
        "worker_file": state.get("worker_file"),
        "overlap": state.get("overlap"),
    }
    if server.plan.worker == ARM_NONE:
        return columns
    if server.plan.arm == "adaptive":
        if not state.get("adaptive"):
            raise ValueError("SGLang has dropped --speculative-adaptive: its log says why")
    elif not state.get("active"):
        raise ValueError(f"the switch is not active: {state.get('inactive_reason') or 'no plugin in this server'}")
    else:
        columns |= {name: state.get(name) for name in ("threshold", "resume_threshold", "dwell_steps")}
    return columns | {
        "topk": info.get("speculative_eagle_topk"),
        "num_steps": info.get("speculative_num_steps"),
        "num_draft_tokens": info.get("speculative_num_draft_tokens"),
    }
