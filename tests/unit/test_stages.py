"""A step's split into stages: measured while a step trace is written, and nothing touched otherwise."""

import pytest

from specdec.sglang_plugin.stages import STAGES, TRACE_VARIABLE, time_stages


class Worker:
    def draft(self, batch: int) -> int:
        return batch + 1

    def verify(self, batch: int, *, grammar: int = 0) -> int:
        return batch + grammar

    def extend(self) -> None:
        raise RuntimeError("out of memory")


def test_without_a_trace_the_worker_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRACE_VARIABLE, raising=False)
    worker = Worker()
    assert time_stages(draft=(worker, "draft"), verify=(worker, "verify"), draft_extend=(worker, "extend")) is None
    assert vars(worker) == {}


def test_stages_do_as_before_and_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACE_VARIABLE, "trace.jsonl")
    clock = iter(range(0, 10**9, 3_000_000))  # every look at the clock is 3 ms after the one before
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(clock))
    worker = Worker()
    times = time_stages(draft=(worker, "draft"), verify=(worker, "verify"), draft_extend=(worker, "extend"))
    assert times is not None
    assert worker.draft(1) == 2
    assert worker.verify(1, grammar=4) == 5
    assert worker.verify(2) == 2
    assert times.take() == {"draft": 3000, "verify": 6000, "draft_extend": 0}
    assert times.take() == dict.fromkeys(STAGES, 0), "a step starts from nothing"
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.extend()
