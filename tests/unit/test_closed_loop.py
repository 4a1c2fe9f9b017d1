"""Ramps over a fake server: how many requests are in flight, what is recorded, how it ends."""

from __future__ import annotations

import asyncio
import json

import pytest
from fakes import Behaviour, FakeServer

from specdec.load.closed_loop import Phase, ramp, warm_up
from specdec.load.loop_thread import CellError
from specdec.load.prompts import Prompt
from specdec.load.request_stream import Ramp, Request, RequestStream
from specdec.servers.server import ServerDied

PROMPTS: list[Prompt] = ["one", "two", (3, 4, 5)]


def asked(output_tokens: int) -> list[Request]:
    return [Request(prompt, output_tokens) for prompt in PROMPTS]


def slowly(seconds: float) -> Behaviour:
    """Each token after `seconds`."""
    return Behaviour(gap=lambda _: asyncio.sleep(seconds))


def test_concurrency_follows_the_phases() -> None:
    with FakeServer(slowly(0.002)) as server:
        server.set_threshold(2)
        result: Ramp = ramp(
            server,
            [Phase(1, requests=3), Phase(6, requests=12), Phase(2, requests=4)],
            asked(8),
            sample_s=0.02,
        )
        assert server.most_in_flight == 6
        sent = [request.get("text") or tuple(request["input_ids"]) for request in server.requests]
        state = server.state()
    requests, samples = result.requests, result.samples
    assert requests["error"].isna().all()
    assert len(requests) == len(sent) >= 3 + 12 + 4
    assert (requests["output_tokens"] == 8).all()
    assert (requests["input_tokens"] == 7).all()
    assert sent[:4] == ["one", "two", (3, 4, 5), "one"]
    assert sorted(requests["phase"].unique()) == [0, 1, 2]
    for _, request in requests[requests["phase"] == 2].iterrows():  # lower than before: drains first
        in_flight = (requests["start_s"] <= request["start_s"]) & (request["start_s"] < requests["end_s"])
        assert in_flight.sum() <= 2
    ordered = requests[["start_s", "first_token_s", "last_token_s", "end_s"]]
    assert (ordered.diff(axis=1).iloc[:, 1:] >= 0).all().all()
    assert samples["t_s"].is_monotonic_increasing
    assert set(samples["concurrency"]) <= {0, 1, 2, 6}
    assert set(samples["mode"].dropna()) == {"plain", "speculative"}
    assert samples["batch_size"].max() <= 6
    assert samples["switches_off"].iloc[-1] == state["switches_off"] >= 1
    received = (samples["output_tok_s"] * samples["t_s"].diff()).sum()
    assert received == pytest.approx(8 * len(requests))  # no token is missed or counted twice


def test_in_flight_never_exceeds_a_lower_phase_once_it_has_drained() -> None:
    with FakeServer(slowly(0.002)) as server:
        ramp(server, [Phase(5, requests=5)], asked(5))
        server.most_in_flight = 0
        ramp(server, [Phase(2, requests=8)], asked(5))
        assert server.most_in_flight == 2


def test_a_phase_of_a_duration_ends_and_a_pause_is_possible() -> None:
    with FakeServer(slowly(0.001)) as server:
        result = ramp(server, [Phase(2, duration_s=0.3), Phase(0, duration_s=0.1), Phase(1, requests=1)], asked(4))
    assert set(result.requests["phase"]) == {0, 2}
    assert result.requests["due_s"].isna().all()  # a closed loop has no time at which a request is due


def test_each_request_is_answered_with_its_own_number_of_tokens() -> None:
    with FakeServer() as server:
        requests = ramp(server, [Phase(1, requests=4)], [Request("a", 3), Request("b", 7)]).requests
    assert requests["output_tokens"].tolist()[:4] == [3, 7, 3, 7]
    assert (requests["first_tokens"] == 1).all()


@pytest.mark.parametrize(
    "phase",
    [
        {"concurrency": 1},
        {"concurrency": -1, "requests": 1},
        {"concurrency": 1, "requests": 1, "duration_s": 1.0},
        {"concurrency": 0, "requests": 1},
    ],
)
def test_impossible_phases_are_refused(phase: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Phase"):
        Phase(**phase)  # type: ignore[arg-type]


def test_failed_requests_are_rows_with_their_error() -> None:
    with FakeServer(Behaviour(error_event=True)) as server:
        result = ramp(server, [Phase(1, requests=1)], asked(4))
    assert result.requests["error"].str.contains("out of memory").all()
    assert result.requests["first_token_s"].isna().all()  # missing, not 0
    with FakeServer(Behaviour(missing_tokens=1)) as server:
        assert ramp(server, [Phase(1, requests=1)], asked(4)).requests["error"].tolist() == [
            "ConnectionError: 3 tokens, asked 4"
        ]
        with pytest.raises(CellError, match="warm-up: ConnectionError: 3 tokens, asked 4"):
            warm_up(server, [1], PROMPTS, 4)


def test_stall_ends_a_ramp() -> None:
    stalls = pytest.raises(CellError, match="stalled: no token for 1 s; /health answers 200")
    with FakeServer(Behaviour(stall_from_request=1)) as server, stalls:
        ramp(server, [Phase(1, requests=9)], asked(4), stall_s=1.0)


def test_a_pause_before_a_request_is_no_stall() -> None:
    """100 s without a token and without a request, then an answer during which the watch looks at least once."""
    with FakeServer(slowly(1.5)) as server:
        stream = RequestStream(server, stall_s=50.0)  # type: ignore[arg-type]

        async def load() -> None:
            stream._token_s -= 100
            await stream.answer(Request("a", 1))

        assert stream.run(load, sample_s=None).requests["error"].isna().all()


def test_death_ends_a_ramp() -> None:
    with FakeServer(Behaviour(die_at_request=1)) as server, pytest.raises(ServerDied, match="the last line"):
        ramp(server, [Phase(2, requests=50)], asked(4))


def test_tokens_are_counts_and_not_chunks() -> None:
    """A role chunk, two first tokens without text, three tokens in one chunk, an empty repeat at the end."""
    with FakeServer() as server:
        stream = RequestStream(server, 10.0)  # type: ignore[arg-type]
        row = {"output_tokens": 0, "input_tokens": None}
        for now_s, text, count in [(0.5, "", 0), (1.0, "", 2), (4.0, "abcde", 5), (9.0, "abcde", 5)]:
            stream.now_s = lambda now_s=now_s: now_s  # type: ignore[method-assign]
            chunk = {"text": text, "meta_info": {"completion_tokens": count, "prompt_tokens": 7}}
            stream._take_chunk(f"data: {json.dumps(chunk)}\n".encode(), row)
        for line in (b"data: [DONE]\n", b"\n", b": comment\n"):
            stream._take_chunk(line, row)
    assert row == {"output_tokens": 5, "input_tokens": 7, "first_token_s": 1.0, "first_tokens": 2, "last_token_s": 4.0}


def test_an_aborted_request_is_an_error() -> None:
    with FakeServer() as server:
        stream = RequestStream(server, 10.0)  # type: ignore[arg-type]
        meta = {"completion_tokens": 2, "finish_reason": {"type": "abort", "message": "no memory"}}
        with pytest.raises(ConnectionError, match="aborted: no memory"):
            stream._take_chunk(f"data: {json.dumps({'text': 'x', 'meta_info': meta})}".encode(), {"output_tokens": 0})
