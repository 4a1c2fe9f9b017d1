"""The threshold policy: speculate up to a batch size, with hysteresis and dwell."""

from enum import Enum

from specdec.policy.settings import SwitchSettings


class Mode(str, Enum):
    """What a decode step does: draft and verify, or yield one token per request."""

    SPECULATIVE = "speculative"
    PLAIN = "plain"


class ThresholdPolicy:
    """Decides the mode of each decode step from its batch size.

    Above the threshold speculation goes off, at the resume threshold or below it comes back, in between the mode
    stays; a mode that was switched to is kept for ``dwell_steps`` decode steps. No clock and no randomness: ranks
    that see the same batch sizes decide the same.
    """

    def __init__(self, settings: SwitchSettings) -> None:
        self.settings = settings
        self.mode = Mode.SPECULATIVE
        self.steps_in_mode: int | None = None  # None: not switched yet, so nothing to dwell on

    def decide(self, batch_size: int) -> Mode:
        """The mode of the next decode step, which has batch_size (>= 1) requests."""
        wanted = self._wanted(batch_size)
        dwelt = self.steps_in_mode is None or self.steps_in_mode >= self.settings.dwell_steps
        if wanted is not self.mode and dwelt:
            self.mode = wanted
            self.steps_in_mode = 0
        if self.steps_in_mode is not None:
            self.steps_in_mode += 1
        return self.mode

    def _wanted(self, batch_size: int) -> Mode:
        threshold, resume_at = self.settings.threshold, self.settings.resume_at
        if threshold is None or resume_at is None:
            return Mode.SPECULATIVE
        if batch_size > threshold:
            return Mode.PLAIN
        if batch_size <= resume_at:
            return Mode.SPECULATIVE
        return self.mode
