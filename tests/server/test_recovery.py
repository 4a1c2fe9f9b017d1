"""Speculation comes back as good as it was (case 3): draft state and accept length after an off spell."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from client import Request, generate, prompt
from shapes import RANDOM, on_all_shapes

from specdec.servers.server import Server

pytestmark = [pytest.mark.sglang, on_all_shapes]
LENGTH = 400  # tokens: an on spell, an off spell and an on spell


def rows(path: Path, start: int = 0) -> list[list]:
    """The lines of a trace from byte `start` on that are complete."""
    with path.open("rb") as trace:
        trace.seek(start)
        return [json.loads(line) for line in trace.read().splitlines(keepends=True) if line.endswith(b"\n")]


def size(path: Path) -> int:
    return path.stat().st_size


def test_draft_state_is_that_of_a_run_that_always_speculated(switched: Server, draft_trace: Path) -> None:
    requests = [Request(prompt(i), 80, delay_s=0.1 * i) for i in range(6)]
    states = []
    for threshold in (None, RANDOM):
        switched.set_threshold(threshold)
        switched.flush_cache()
        draft_trace.touch()
        generate(switched.url, requests)
        states.append({(tuple(ids), seq_len): rest for ids, seq_len, *rest in rows(draft_trace)})
        draft_trace.unlink()
    always, mixed = states
    common = always.keys() & mixed.keys()
    assert len(mixed) > len(common) > 40, "plain steps stop at positions that speculative steps jump over"
    for key in common:
        (tokens, probabilities, norm), (mixed_tokens, mixed_probabilities, mixed_norm) = always[key], mixed[key]
        assert mixed_norm == pytest.approx(norm, rel=1e-3), key
        assert mixed_probabilities == pytest.approx(probabilities, abs=1e-3), key
        assert mixed_tokens[0] == tokens[0], key


def test_accept_length_comes_back_after_an_off_spell(switched: Server, step_trace: Path) -> None:
    """The same request always on, and on -> off -> on: after the spell each step accepts what it did without one."""
    server, path = switched, step_trace
    request = Request(prompt(3), LENGTH)

    server.flush_cache()
    first = size(path)
    generate(server.url, [request])
    always = rows(path, first)

    server.flush_cache()
    first = size(path)
    generate_with_off_spell(server, request, path)
    spell = rows(path, first)
    off = [row["step"] for row in spell if row["mode"] == "plain"]
    assert len(off) > 20, "the off spell was too short to say anything"
    assert spell[0]["mode"] == spell[-1]["mode"] == "speculative"

    expected = accepted_by_position(always)
    after = accepted_by_position(spell)
    resumed_at = position_after(spell, off[-1])
    common = [p for p in after if p >= resumed_at and p in expected]
    assert len(common) > 20, "the two runs never stepped from the same position after the spell"
    assert [after[p] for p in common] == [expected[p] for p in common]


def generate_with_off_spell(server: Server, request: Request, trace: Path) -> None:
    """Switch off while the request is in its first third, and on again in its second."""
    first = size(trace)
    thread = threading.Thread(target=generate, args=(server.url, [request]))
    thread.start()
    wait_for(lambda: len(rows(trace, first)) >= 20)
    server.set_threshold(0)
    wait_for(lambda: sum(row["mode"] == "plain" for row in rows(trace, first)) >= 30)
    server.set_threshold(None)
    thread.join()


def wait_for(true: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "the server stands still"
        time.sleep(0.01)


def accepted_by_position(steps: list[dict]) -> dict[int, int]:
    """Tokens committed by each speculative step, by the number of output tokens before it (one from the prefill)."""
    position, accepted = 1, {}
    for row in steps:
        if row["mode"] == "speculative":
            accepted[position] = row["tokens"]
        position += row["tokens"]
    return accepted


def position_after(steps: list[dict], step: int) -> int:
    return 1 + sum(row["tokens"] for row in steps if row["step"] <= step)
