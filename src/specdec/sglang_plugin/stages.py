"""How a decode step splits into draft, verify and draft extend: host time, measured only while a step trace
is written.

On a GPU the stages are launched, not waited for: their times add up to the launch of the step alone.
"""

import os
import time
from collections.abc import Callable
from typing import Any

TRACE_VARIABLE = "SPECDEC_TRACE"
STAGES = ("draft", "verify", "draft_extend")


class StageTimes:
    """Microseconds that the running decode step has spent in each stage."""

    def __init__(self) -> None:
        self.spent_us = dict.fromkeys(STAGES, 0)

    def take(self) -> dict[str, int]:
        """The times since the last call; a plain step has spent nothing, or hardly anything, on its draft."""
        spent, self.spent_us = self.spent_us, dict.fromkeys(STAGES, 0)
        return spent

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start_ns = time.perf_counter_ns()
            result = function(*args, **kwargs)
            self.spent_us[stage] += (time.perf_counter_ns() - start_ns) // 1000
            return result

        return run


def time_stages(**methods: tuple[Any, str]) -> StageTimes | None:
    """Time a worker's stages, if a step trace is written; otherwise leave it alone and return None.

    methods: for each of STAGES the object and the name of its method that runs the stage.
    """
    if not os.environ.get(TRACE_VARIABLE):
        return None
    times = StageTimes()
    for stage, (owner, name) in methods.items():
        setattr(owner, name, times.timed(stage, getattr(owner, name)))
    return times
