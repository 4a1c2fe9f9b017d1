"""The switch of one scheduler process: the policy, what it has decided so far, and its log lines."""

import logging
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from specdec.policy import Mode, SwitchSettings, ThresholdPolicy
from specdec.worker_path.path import rules_for

logger = logging.getLogger("specdec")


class Switch:
    """Decides every decode step of a worker. Rank 0 logs; the other ranks decide the same and stay silent.

    warm_up: run the first two decode steps plain and speculative whatever the policy says. They belong to the request
    that SGLang sends to itself before it says ready, so that neither kind of step runs for the first time under load.
    """

    def __init__(self, settings: SwitchSettings, is_rank_0: bool, warm_up: bool) -> None:
        self.policy = ThresholdPolicy(settings)
        self.mode = Mode.SPECULATIVE  # of the last decode step
        self.warm_up = [Mode.PLAIN, Mode.SPECULATIVE] if warm_up else []
        self.is_rank_0 = is_rank_0
        self.switches_off = 0
        self.switches_on = 0
        self.refused_change: str | None = None

    @property
    def settings(self) -> SwitchSettings:
        return self.policy.settings

    def decide(self, batch_size: int) -> Mode:
        """The mode of the decode step that is about to run."""
        if self.warm_up:
            self.mode = self.warm_up.pop(0)
            return self.mode
        before = self.policy.mode
        self.mode = self.policy.decide(batch_size)
        if self.mode is not before:
            self._count_switch(self.mode, batch_size)
        return self.mode

    def _count_switch(self, mode: Mode, batch_size: int) -> None:
        off = mode is Mode.PLAIN
        self.switches_off += off
        self.switches_on += not off
        if self.is_rank_0:
            compared = f"above {self.settings.threshold}" if off else f"at or below {self.settings.resume_at}"
            if self.settings.threshold is None:
                compared = "no threshold set"
            logger.info("specdec: speculation %s: batch size %d, %s", "off" if off else "on", batch_size, compared)

    def change(self, change: Any) -> bool:
        """Change settings on the running server; False, one log line and nothing changed if they are impossible."""
        try:
            if not isinstance(change, Mapping):
                raise ValueError(f"expected an object with threshold, resume_threshold or dwell_steps, not {change!r}")
            self.policy.settings = self.settings.changed(change)
        except ValueError as error:
            self.refused_change = str(error)
            if self.is_rank_0:
                logger.warning("specdec: settings unchanged: %s", error)
            return False
        self.refused_change = None
        if self.is_rank_0:
            logger.info("specdec: settings changed: %s", describe(self.settings))
        return True


def make_switch(server_args: Any, tp_rank: int) -> Switch:
    """The switch of a worker, from the settings that the command line put on server_args."""
    resolved = rules_for(version("sglang")).resolved(server_args)
    return Switch(server_args.specdec, is_rank_0=tp_rank == 0, warm_up=not resolved.skip_server_warmup)


def describe(settings: SwitchSettings) -> str:
    """The settings as the log shows them."""
    if settings.threshold is None:
        return "no threshold (always speculates)"
    return f"threshold {settings.threshold}, resume threshold {settings.resume_at}, dwell {settings.dwell_steps} steps"
