"""The three numbers of the switch, validated."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class SwitchSettings:
    """Threshold, resume threshold and dwell of the switch.

    threshold: the largest batch size that still speculates; 0 = never speculate, None = always.
    resume_threshold: speculation comes back at this batch size or below (default: the threshold).
    dwell_steps: decode steps that a mode is kept at least.

    Raises ValueError, in one line, for values that make no sense together.
    """

    threshold: int | None = None
    resume_threshold: int | None = None
    dwell_steps: int = 1

    def __post_init__(self) -> None:
        _require_int("threshold", self.threshold, minimum=0, optional=True)
        _require_int("resume threshold", self.resume_threshold, minimum=0, optional=True)
        _require_int("dwell", self.dwell_steps, minimum=1, optional=False)
        if self.resume_threshold is None:
            return
        if self.threshold is None:
            raise ValueError("a resume threshold needs a threshold; give both, or neither")
        if self.resume_threshold > self.threshold:
            raise ValueError(
                f"the resume threshold ({self.resume_threshold}) is above the threshold ({self.threshold}); "
                f"use a value from 1 to {self.threshold}"
            )
        if self.resume_threshold == 0 and self.threshold > 0:
            raise ValueError(
                "a resume threshold of 0 would never bring speculation back (a decode batch has at least 1 request); "
                f"use a value from 1 to {self.threshold}"
            )

    @property
    def resume_at(self) -> int | None:
        """The resume threshold in force."""
        return self.threshold if self.resume_threshold is None else self.resume_threshold

    def changed(self, change: Mapping[str, Any]) -> "SwitchSettings":
        """These settings with some replaced. A new threshold without a resume threshold resets that to its default.

        Raises ValueError for an unknown name or an impossible value.
        """
        known = {"threshold", "resume_threshold", "dwell_steps"}
        if not change or not set(change) <= known:
            unknown = ", ".join(sorted(set(change) - known)) or "nothing"
            raise ValueError(f"cannot set {unknown}; known: {', '.join(sorted(known))}")
        values = dict(change)
        if "threshold" in values:
            values.setdefault("resume_threshold", None)
        return replace(self, **values)


def _require_int(name: str, value: Any, minimum: int, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"the {name} must be an integer of {minimum} or more, not {value!r}")
