"""What the client makes of a server's answers: counts, times, failures. No SGLang server."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import Behaviour, FakeServer, SteppedClock

from specdec.load.bench import RequestTimes, bench_module
from specdec.load.cell import Slo, run_cell, summarize
from specdec.load.loop_thread import CellError, run_in_thread
from specdec.load.prompts import PromptSet, read_prompts
from specdec.servers import counters
from specdec.servers.counters import state_delta
from specdec.servers.server import ServerDied

PROMPTS = ["one", "two", (3, 4, 5), "four", "five", "six"]
NO_STATE = dict.fromkeys(counters.STATE_COLUMNS)


@pytest.fixture(autouse=True)
def _short_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "COUNTERS_SETTLE_S", 1.0)


def times(tokens: int = 11, ttft_s: float = 0.5, tpot_s: float = 0.1, start_s: float = 0.0) -> RequestTimes:
    return RequestTimes(start_s, ttft_s, tpot_s, ttft_s + tpot_s * (tokens - 1), tokens)


# Steady cells through bench_serving


def test_cell_counts_tokens_and_batches_as_the_server_does() -> None:
    """Case 16: beside the concurrency asked for stands the batch that ran."""
    with FakeServer(Behaviour(metric_lag_s=0.2)) as server:
        cell = run_cell(server, PROMPTS, concurrency=2, output_tokens=5)
        assert server.most_in_flight == 2
        assert server.calls["flush_cache"] == 1
        assert [r.get("text") or tuple(r["input_ids"]) for r in server.requests] == PROMPTS
        for request in server.requests:
            sampling = request["sampling_params"]
            assert (sampling["temperature"], sampling["max_new_tokens"], sampling["ignore_eos"]) == (
                0.0,
                5,
                True,
            )
            assert request["stream"] is True
    assert cell.error is None
    assert cell.output_tokens == 30
    assert cell.input_tokens == 6 * 7
    assert cell.output_tok_s == pytest.approx(30 / cell.duration_s)
    assert cell.total_tok_s == pytest.approx(72 / cell.duration_s)
    assert cell.requests_per_s == pytest.approx(6 / cell.duration_s)
    assert cell.achieved_batch_mean is not None
    assert 1 <= cell.achieved_batch_mean <= 2
    assert cell.achieved_batch_peak == 2
    assert cell.speculative_steps == 30
    assert cell.accept_length == 1.0


def test_a_server_that_admits_fewer_requests_shows_in_the_achieved_batch() -> None:
    """Case 16: concurrency 6 asked for, 2 admitted at once."""

    async def until_all_are_here(_: int) -> None:
        while server.most_in_flight < 6:
            await asyncio.sleep(0.01)

    with FakeServer(Behaviour(most_running=2, gap=until_all_are_here)) as server:
        cell = run_cell(server, PROMPTS, concurrency=6, output_tokens=5)
    assert cell.error is None
    assert cell.achieved_batch_peak == 2


def test_second_cell_counts_only_its_own_work() -> None:
    with FakeServer() as server:
        run_cell(server, PROMPTS, concurrency=3, output_tokens=4)
        cell = run_cell(server, PROMPTS[:2], concurrency=1, output_tokens=4)
    assert cell.error is None
    assert (cell.output_tokens, cell.input_tokens, cell.speculative_steps) == (8, 14, 8)
    assert cell.achieved_batch_peak == 1


@pytest.mark.parametrize(
    ("behaviour", "server_count"),
    [
        (Behaviour(miscounted_tokens=1), 11 * 2),
        (Behaviour(miscounted_tokens=-1), 9 * 2),
        (Behaviour(missing_tokens=1), 9 * 2),
        (Behaviour(no_text=True, missing_tokens=10), 0),  # bench_serving counts it as the length asked for
    ],
)
def test_wrong_number_of_tokens_is_an_error(behaviour: Behaviour, server_count: int) -> None:
    with FakeServer(behaviour) as server:
        cell = run_cell(server, PROMPTS[:2], concurrency=2, output_tokens=10)
    assert cell.error is not None
    assert "asked 20" in cell.error
    assert cell.output_tokens == server_count


def test_an_error_event_in_an_answer_with_status_200_is_an_error() -> None:
    with FakeServer(Behaviour(error_event=True)) as server:
        cell = run_cell(server, PROMPTS[:2], concurrency=2, output_tokens=10)
    assert cell.error is not None


def test_stall_ends_the_cell_though_health_says_200() -> None:
    with FakeServer(Behaviour(stall_from_request=3)) as server:
        with pytest.raises(CellError, match=r"stalled: no token for 1 s; /health answers 200"):
            run_cell(server, PROMPTS, concurrency=2, output_tokens=5, stall_s=1.0)
        assert server.health()


def test_stall_of_a_server_that_does_not_answer_is_bounded() -> None:
    """Its state would be waited for 30 s each time; here the stall is seen after less than two `stall_s`."""
    began_s = time.monotonic()
    behaviour = Behaviour(stall_from_request=0, hangs_in_stall=True)
    with FakeServer(behaviour) as server, pytest.raises(CellError, match=r"stalled: no token for 2 s"):
        run_cell(server, PROMPTS, concurrency=2, output_tokens=5, stall_s=2.0)
    assert time.monotonic() - began_s < 25


def test_slow_but_moving_cell_is_not_a_stall() -> None:
    with FakeServer(Behaviour(gap=lambda _: asyncio.sleep(0.4))) as server:
        cell = run_cell(server, PROMPTS[:1], concurrency=1, output_tokens=8, stall_s=1.2)
    assert cell.error is None


def test_server_death_in_the_middle_of_a_cell() -> None:
    with FakeServer(Behaviour(die_at_request=2)) as server, pytest.raises((CellError, ServerDied, OSError)):
        run_cell(server, PROMPTS, concurrency=2, output_tokens=50)


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 6])
def test_time_per_token_does_not_depend_on_the_tokens_of_a_chunk(
    tokens_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 14: 100 ms per token, however many of 13 come in one chunk; per chunk it would be six times that."""
    clock = SteppedClock()
    monkeypatch.setattr(bench_module(), "time", clock)

    async def gap(chunk: int) -> None:
        await clock.advance(0.1 * min(tokens_per_chunk, 13 - chunk * tokens_per_chunk))

    with FakeServer(Behaviour(tokens_per_chunk=tokens_per_chunk, gap=gap)) as server:
        cell = run_cell(server, ["one"], concurrency=1, output_tokens=13)
    assert cell.error is None
    assert (cell.tpot_ms_p50, cell.tpot_ms_p99) == pytest.approx((100, 100))
    assert cell.ttft_ms_p50 == pytest.approx(100 * tokens_per_chunk)
    assert cell.e2e_ms_p50 == pytest.approx(1300)


@pytest.mark.parametrize(
    ("role_chunk", "empty_first_text", "ttft_ms", "tpot_ms"),
    [
        (True, False, 1000, 1800 / 7),  # 7 tokens after the first text in 1.8 s
        (False, True, 1600, 1200 / 4),  # the first text brings the count to 6: 4 tokens after it in 1.2 s
        (True, True, 1600, 1200 / 4),
    ],
)
def test_times_where_the_first_chunks_hold_no_text(
    role_chunk: bool, empty_first_text: bool, ttft_ms: float, tpot_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 14: 3 tokens at 1 s, then 3, 3 and 1 tokens, 0.6 s apart.

    Before them a chunk without a token, as a chat stream begins with a role; ours is the stream of /generate,
    never OpenAI's. The first tokens may have no text yet: half a character.
    """
    clock = SteppedClock()
    monkeypatch.setattr(bench_module(), "time", clock)
    gaps_s = [1.0, 0.6, 0.6, 0.6]
    behaviour = Behaviour(
        tokens_per_chunk=3,
        empty_first_text=empty_first_text,
        role_chunk=role_chunk,
        gap=lambda index: clock.advance(gaps_s[index]),
    )
    with FakeServer(behaviour) as server:
        cell = run_cell(server, ["one"], concurrency=1, output_tokens=10)
    assert cell.error is None
    assert cell.ttft_ms_p50 == pytest.approx(ttft_ms)
    assert cell.tpot_ms_p50 == pytest.approx(tpot_ms)
    assert cell.e2e_ms_p50 == pytest.approx(2800)
    assert cell.duration_s == pytest.approx(2.8)


def test_times_per_token_one_token_per_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SteppedClock()
    monkeypatch.setattr(bench_module(), "time", clock)
    with FakeServer(Behaviour(gap=lambda index: clock.advance(0.25 if index else 2.0))) as server:
        cell = run_cell(server, ["one"], concurrency=1, output_tokens=5)
    assert cell.ttft_ms_p99 == pytest.approx(2000)
    assert cell.tpot_ms_p99 == pytest.approx(250)
    assert cell.e2e_ms_p99 == pytest.approx(3000)


def test_numbers_are_those_of_bench_serving_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same requests, same clock: what bench_serving makes of them, and what we make of them."""
    clock, bench = SteppedClock(), bench_module()
    original, reports = bench.benchmark, []

    async def benchmark(**arguments: Any) -> Any:
        reports.append(await original(**arguments))
        return reports[-1]

    monkeypatch.setattr(bench, "time", clock)
    monkeypatch.setattr(bench, "benchmark", benchmark)
    gaps_s = iter([0.5, 0.1, 0.1, 0.3, 0.2, 0.2, 0.7, 0.3, 0.1])
    with FakeServer(Behaviour(gap=lambda _: clock.advance(next(gaps_s)))) as server:
        cell = run_cell(server, ["one", "two", "three"], concurrency=1, output_tokens=3)
    (theirs,) = reports
    assert cell.error is None
    assert cell.output_tok_s == pytest.approx(theirs["output_throughput"])
    assert cell.requests_per_s == pytest.approx(theirs["request_throughput"])
    assert (cell.ttft_ms_p50, cell.ttft_ms_p99) == pytest.approx((theirs["median_ttft_ms"], theirs["p99_ttft_ms"]))
    assert (cell.tpot_ms_p50, cell.tpot_ms_p99) == pytest.approx((theirs["median_tpot_ms"], theirs["p99_tpot_ms"]))
    assert (cell.e2e_ms_p90, cell.e2e_ms_p99) == pytest.approx(
        (theirs["p90_e2e_latency_ms"], theirs["p99_e2e_latency_ms"])
    )


# From requests to columns


def test_percentiles_are_over_requests() -> None:
    done = [times(ttft_s=i / 100, tpot_s=i / 1000) for i in range(1, 101)]
    cell = summarize(done, 700, 1100, 1100, Slo(), **NO_STATE)
    milliseconds = np.arange(1, 101)
    assert cell.error is None
    assert cell.ttft_ms_p50 == pytest.approx(np.percentile(milliseconds * 10, 50))
    assert cell.ttft_ms_p90 == pytest.approx(np.percentile(milliseconds * 10, 90))
    assert cell.ttft_ms_p99 == pytest.approx(np.percentile(milliseconds * 10, 99))
    assert cell.tpot_ms_p50 == pytest.approx(50.5)
    assert cell.tpot_ms_p99 == pytest.approx(np.percentile(milliseconds, 99))
    assert cell.e2e_ms_p50 == pytest.approx(np.percentile(milliseconds * 20, 50))


def test_duration_is_from_first_send_to_last_answer() -> None:
    done = [times(start_s=10.0), times(start_s=14.0), times(start_s=11.0)]
    assert summarize(done, 0, 33, 33, Slo(), **NO_STATE).duration_s == pytest.approx(4.0 + 1.5)


def test_goodput_needs_both_limits_met() -> None:
    fast, late, slow = times(), times(ttft_s=0.9), times(tpot_s=0.3)
    single = replace(times(tokens=1), tpot_s=None)
    nothing = replace(times(), ttft_s=None, tpot_s=None)
    done = [fast, late, slow, single, nothing]

    def good(slo: Slo) -> float:
        cell = summarize(done, 0, 45, 45, slo, **NO_STATE)
        assert cell.goodput_requests_per_s is not None
        return cell.goodput_requests_per_s * cell.duration_s

    assert good(Slo(ttft_ms=500, tpot_ms=100)) == pytest.approx(2)
    assert good(Slo(ttft_ms=500)) == pytest.approx(3)
    assert good(Slo(tpot_ms=100)) == pytest.approx(3)
    assert summarize(done, 0, 45, 45, Slo(), **NO_STATE).goodput_requests_per_s is None


def test_missing_latency_is_missing_and_not_zero() -> None:
    cell = summarize([replace(times(), ttft_s=None, tpot_s=None)], 0, 11, 11, Slo(), **NO_STATE)
    assert cell.ttft_ms_p50 is None
    assert cell.tpot_ms_p99 is None
    assert cell.achieved_batch_mean is None


STATE = {
    "active": True,
    "adaptive": False,
    **{"speculative_steps": 10, "plain_steps": 5, "switches_off": 1, "switches_on": 1},
    **{"speculative_tokens": 25, "speculative_request_steps": 10, "steps_by_batch_size": {"1": 10, "4": 5}},
}


def test_state_delta_counts_what_happened_between() -> None:
    after = STATE | {
        **{"speculative_steps": 14, "plain_steps": 11, "switches_off": 2, "switches_on": 2},
        **{"speculative_tokens": 49, "speculative_request_steps": 20},
        "steps_by_batch_size": {"1": 12, "2": 2, "4": 5, "8": 6},
    }
    assert state_delta(STATE, after) == {
        **{"achieved_batch_mean": (2 * 1 + 2 * 2 + 6 * 8) / 10, "achieved_batch_peak": 8},
        **{"accept_length": 2.4, "speculative_steps": 4, "plain_steps": 6, "plain_step_share": 0.6},
        **{"switches_off": 1, "switches_on": 1},
    }


def test_state_delta_of_baseline_and_of_a_server_without_plugin() -> None:
    idle = {"active": False, "adaptive": False, "steps_by_batch_size": {}}
    after = {"active": False, "adaptive": False, "steps_by_batch_size": {"3": 2}}
    baseline = state_delta(idle, after)
    assert (baseline["achieved_batch_mean"], baseline["achieved_batch_peak"]) == (3.0, 3)
    assert baseline["plain_steps"] is None
    assert set(state_delta(None, None).values()) == {None}


def test_accept_length_is_missing_without_a_speculative_step() -> None:
    after = STATE | {"plain_steps": 9, "steps_by_batch_size": {"1": 10, "4": 9}}
    assert state_delta(STATE, after)["accept_length"] is None
    assert state_delta(STATE, after)["plain_step_share"] == 1.0


# Threads


def test_runs_inside_a_running_event_loop_as_in_a_notebook() -> None:
    async def notebook() -> int:
        return run_in_thread(work, lambda: None)

    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert asyncio.run(notebook()) == 7


def test_what_the_watch_raises_cancels_the_work() -> None:
    cancelled = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def watch() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_thread(work, watch)
    assert cancelled.is_set()


def test_no_task_is_left_when_the_work_is_cancelled() -> None:
    """A task that the work started ends with it; left pending, it would be reported whenever it is collected."""
    ended = threading.Event()

    async def helper() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    async def work() -> None:
        task = asyncio.create_task(helper())
        await asyncio.sleep(3600)
        await task

    def watch() -> None:
        raise CellError("stalled")

    with pytest.raises(CellError):
        run_in_thread(work, watch)
    assert ended.is_set()


def test_work_stuck_in_a_blocking_call_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    async def work() -> None:
        released.wait(60)

    def watch() -> None:
        raise CellError("stalled")

    with pytest.raises(CellError):
        run_in_thread(work, watch, join_s=0.1)
    released.set()
    deadline = time.monotonic() + 10
    while any(t.name == "specdec-load" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(t.name == "specdec-load" for t in threading.enumerate())


# Prompt files


def test_prompt_formats(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"ids": [1, 2], "text": "text wins"}\n{"ids": [1, 2]}\n\n{"prompt": "p"}\n'
        '{"conversations": [{"from": "human", "value": "share"}, {"from": "gpt", "value": "no"}]}\n'
        '{"conversations": [{"role": "user", "content": "chat"}]}\n'
    )
    prompts = read_prompts(file)
    assert prompts.prompts == ("text wins", (1, 2), "p", "share", "chat")
    assert prompts.name == "prompts.jsonl"
    assert len(prompts.sha256) == 64


@pytest.mark.parametrize("line", ["{}", "[]", "no json", '{"text": 3}', '{"conversations": []}', '{"ids": ["x"]}'])
def test_a_line_without_a_prompt_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2: no prompt"):
        read_prompts(file)


def test_missing_and_empty_prompt_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nope\.jsonl: No such file"):
        read_prompts(tmp_path / "nope.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(tmp_path / "empty.jsonl")


def test_pick_takes_each_prompt_once_before_any_twice() -> None:
    prompts = PromptSet("p", "0" * 64, tuple("abcde"))
    picked = prompts.pick(12, "seed")
    assert sorted(picked[:5]) == list("abcde")
    assert picked[5:10] == picked[:5]
    assert picked == prompts.pick(12, "seed")
    assert picked != prompts.pick(12, "another")
