"""Open loops over a fake server: nothing waits for an answer, what is recorded, what it sums up to."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fakes import Behaviour, FakeServer

from specdec.figures.ramp import recoveries, timelines, with_idle
from specdec.load.cell import Slo
from specdec.load.lengths import parse_lengths
from specdec.load.loop_thread import CellError
from specdec.load.open_loop import open_loop
from specdec.load.open_loop_facts import open_loop_facts
from specdec.load.request_stream import REQUEST_COLUMNS, Request
from specdec.load.shapes import LengthsAsked, Load, OpenLoad, Size, make_load
from specdec.runs import load_ramp
from specdec.runs.load_ramp import MeasuredRamp, RampFacts, measure_ramp, ramp_table, read_ramps, requests_of
from specdec.runs.plan import make_plan
from specdec.runs.step_trace import read_trace
from specdec.servers.server import ServerDied


def every(gap_s: float, requests: list[Request]) -> list[tuple[float, Request]]:
    return [(number * gap_s, request) for number, request in enumerate(requests)]


def test_no_request_waits_for_the_answer_of_another() -> None:
    """The first token comes only when all five requests are there: a loop that waits would stall."""

    async def until_all_are_there(_: int) -> None:
        while len(server.requests) < 5:
            await asyncio.sleep(0.005)

    with FakeServer(Behaviour(gap=until_all_are_there)) as server:
        sent = [Request(f"prompt {number}", number + 2) for number in range(5)]
        result = open_loop(server, every(0.02, sent), stall_s=5.0)  # type: ignore[arg-type]
        bodies = server.requests
    requests = result.requests.sort_values("due_s")
    assert requests["error"].isna().all()
    assert requests["output_tokens"].tolist() == [2, 3, 4, 5, 6]
    assert requests["due_s"].tolist() == pytest.approx([0, 0.02, 0.04, 0.06, 0.08])
    assert (requests["start_s"] >= requests["due_s"]).all()
    assert requests["start_s"].max() < requests["first_token_s"].min()
    assert [body["text"] for body in bodies] == [request.prompt for request in sent]
    assert result.samples["concurrency"].isna().all()  # nobody asked for one
    assert requests["phase"].isna().all()


def test_a_request_sent_late_says_so() -> None:
    """The client itself is busy for 0.3 s while a request is due."""

    def arrivals() -> Iterator[tuple[float, Request]]:
        yield 0.0, Request("a", 2)
        time.sleep(0.3)
        yield 0.1, Request("b", 2)

    with FakeServer() as server:
        requests = open_loop(server, arrivals()).requests.sort_values("due_s")  # type: ignore[arg-type]
    assert requests["start_s"].iloc[1] >= 0.3
    assert requests["due_s"].tolist() == [0.0, 0.1]


def test_failed_requests_are_rows_and_the_others_go_on() -> None:
    with FakeServer(Behaviour(missing_tokens=1)) as server:
        requests = open_loop(server, every(0.01, [Request("a", 4)] * 3)).requests  # type: ignore[arg-type]
    assert requests["error"].tolist() == ["ConnectionError: 3 tokens, asked 4"] * 3
    assert len(server.requests) == 3


def test_stall_and_death_end_it() -> None:
    stalls = pytest.raises(CellError, match="stalled: no token for 1 s; /health answers 200")
    arrivals = every(0.01, [Request("a", 4)] * 5)
    with FakeServer(Behaviour(stall_from_request=1)) as server, stalls:
        open_loop(server, arrivals, stall_s=1.0)  # type: ignore[arg-type]
    with FakeServer(Behaviour(die_at_request=1)) as server, pytest.raises(ServerDied, match="the last line"):
        open_loop(server, arrivals)  # type: ignore[arg-type]


# What it sums up to


def _requests(*rows: tuple[float, float, float, float, float, int, int, str | None]) -> pd.DataFrame:
    names = [
        *("due_s", "start_s", "first_token_s", "last_token_s", "end_s", "first_tokens", "output_tokens", "error"),
    ]
    return pd.DataFrame(rows, columns=names).reindex(columns=list(REQUEST_COLUMNS)).astype(REQUEST_COLUMNS)


def test_latencies_count_from_when_a_request_was_due() -> None:
    load = OpenLoad("trace:t", None, (Size(1, 11),) * 3, (0.0, 1.0, 2.0), 2.0)
    requests = _requests(
        (1.0, 1.3, 1.5, 2.0, 2.1, 1, 11, None),  # 0.5 s to the first token, 50 ms a token, 1.1 s in all
        (0.0, 0.0, 0.1, 2.1, 2.1, 3, 11, None),  # 0.1 s, 2 s over the 8 tokens after the first chunk: 250 ms
        (2.0, 2.2, 2.6, 3.0, 9.0, 1, 5, "ConnectionError: 5 tokens, asked 11"),
    )
    facts = open_loop_facts(load, requests, Slo(ttft_ms=200.0, tpot_ms=None))
    assert facts.ttft_ms_p50 == pytest.approx(300)
    assert facts.tpot_ms_p50 == pytest.approx(150)
    assert facts.e2e_ms_p50 == pytest.approx(1600)
    assert facts.e2e_ms_p99 == pytest.approx(2090)
    assert facts.send_lag_ms_max == pytest.approx(300)
    assert facts.requested_requests_per_s == 1.5
    assert facts.sent_requests_per_s == pytest.approx(3 / 2.2)  # the last one went out 0.2 s late
    assert facts.duration_s == pytest.approx(2.1)
    assert facts.requests_per_s == pytest.approx(2 / 2.1)
    assert facts.output_tok_s == pytest.approx(22 / 2.1)
    assert facts.goodput_requests_per_s == pytest.approx(1 / 2.1)
    assert open_loop_facts(load, requests, Slo()).goodput_requests_per_s is None


def test_a_single_token_has_no_time_per_token() -> None:
    load = OpenLoad("trace:t", None, (Size(1, 1),), (0.0,), 0.0)
    facts = open_loop_facts(load, _requests((0.0, 0.1, 0.5, 0.5, 0.6, 1, 1, None)), Slo())
    assert facts.tpot_ms_p50 is None
    assert facts.ttft_ms_p50 == pytest.approx(500)
    assert facts.requested_requests_per_s is facts.sent_requests_per_s is None


# Prompts of a load


class Tokenizing(FakeServer):
    """Answers /tokenize with a token per character, as SGLang answers it with its tokenizer's."""

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert (path, body["add_special_tokens"]) == ("/tokenize", False)
        return {"tokens": [[ord(character) for character in text] for text in body["prompt"]]}


def test_prompts_of_a_length_are_cut_from_the_servers_tokens() -> None:
    sizes = [Size(3, 10), Size(4, 20)]
    with Tokenizing() as server:
        requests = list(requests_of(server, ["ab", (7, 8), "cd"], sizes))  # type: ignore[arg-type]
    assert requests == [Request((97, 98, 7), 10), Request((8, 99, 100, 97), 20)]


def test_prompts_without_a_length_stand_as_they_are() -> None:
    with FakeServer() as server:
        requests = list(requests_of(server, ["ab", (7, 8)], [Size(None, n) for n in (1, 2, 3)]))  # type: ignore[arg-type]
    assert requests == [Request("ab", 1), Request((7, 8), 2), Request("ab", 3)]


# A whole load, kept and drawn

PLAN = make_plan("cpu-tiny", workers=["v1", "v2"], repeats=1, output_tokens=8)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[FakeServer]:
    """The fakes that measure_ramp gets, one a call, in place of real servers; each traces its chunks."""
    fakes: list[FakeServer] = []

    @contextlib.contextmanager
    def traced_server(*_: object) -> Iterator[tuple[FakeServer, Path]]:
        path = tmp_path / f"trace-{len(fakes)}.jsonl"
        path.touch()

        async def traced(_: int) -> None:
            await asyncio.sleep(0.002)
            state = fake.state()
            step = {"step": 0, "t_s": time.monotonic(), "duration_us": 2000, "tokens": 1}
            with path.open("a") as file:
                file.write(json.dumps(step | {name: state[name] for name in ("batch_size", "mode")}) + "\n")

        with Tokenizing(Behaviour(gap=traced)) as fake:
            fakes.append(fake)
            yield fake, path

    monkeypatch.setattr(load_ramp, "traced_server", traced_server)
    return fakes


def measure(text: str, out: Path, input_tokens: str = "") -> MeasuredRamp:
    given = parse_lengths("input_tokens", input_tokens) if input_tokens else None
    load: Load = make_load(text, 2, 4, 0.2, LengthsAsked(given, parse_lengths("output_tokens", "uniform:4,8")), 0)
    return measure_ramp(PLAN, "v2", out, 2, load)


@pytest.mark.parametrize("text", ["poisson:40", "square:1,4,1"])
def test_a_load_is_kept_and_read_again(text: str, servers: list[FakeServer], tmp_path: Path) -> None:
    measured = measure(text, tmp_path, input_tokens="uniform:3,9")
    (server,) = servers
    (again,) = read_ramps(tmp_path)
    facts = again.facts
    assert facts == measured.facts
    assert facts.load == text
    assert facts.prompt_set == "prompts_heldout.jsonl"
    assert facts.prompt_set_sha256 == PLAN.prompt_set_sha256
    assert (facts.input_tokens, facts.output_tokens, facts.seed) == ("uniform:3,9", "uniform:4,8", 0)
    assert facts.failed_requests == 0
    assert server.calls["flush_cache"] == 1
    sent = server.requests[-facts.requests :]
    assert all(3 <= len(body["input_ids"]) <= 9 for body in sent)
    assert {body["sampling_params"]["max_new_tokens"] for body in sent} <= set(range(4, 9))
    table = pd.read_csv(tmp_path / "ramp" / f"{facts.name}-requests.csv")
    assert len(table) == facts.requests
    assert len(again.trace) == table["output_tokens"].sum()  # the warm-up's steps are not in it
    assert (facts.open_loop is None) == (text == "square:1,4,1")
    assert facts.concurrencies == (() if facts.open_loop else (1, 4, 1))


@pytest.mark.usefixtures("servers")
def test_two_loads_of_a_worker_lie_beside_each_other(tmp_path: Path) -> None:
    measure("poisson:40", tmp_path)
    measure("ramp", tmp_path)
    ramps = read_ramps(tmp_path)
    assert [ramp.facts.name for ramp in ramps] == ["v2", "v2-poisson-40"]
    table = ramp_table(ramps)
    assert list(table.columns) == ["v2", "v2-poisson-40"]
    assert table.loc["ttft_ms_p99", "v2"] == ""
    assert float(table.loc["ttft_ms_p99", "v2-poisson-40"]) > 0  # type: ignore[arg-type]
    assert "input_tokens" not in table.index  # asked of neither
    assert list(timelines(ramps)) == ["v2", "v2-poisson-40"]


def test_a_load_without_an_answer_is_no_ramp(
    monkeypatch: pytest.MonkeyPatch, servers: list[FakeServer], tmp_path: Path
) -> None:
    warm_up = load_ramp.warm_up

    def then_fail(*arguments: Any) -> None:
        warm_up(*arguments)
        servers[0].behaviour.error_event = True

    monkeypatch.setattr(load_ramp, "warm_up", then_fail)
    with pytest.raises(CellError, match=r"no request of poisson:40 was answered: ConnectionError: .*out of memory"):
        measure("poisson:40", tmp_path)
    assert read_ramps(tmp_path) == []


def test_facts_of_an_older_run_are_those_of_a_ramp(tmp_path: Path) -> None:
    older = {"profile": "p", "model": "m", "sglang": "0.5.12", "machine": "x", "worker": "v2", "worker_class": "W"}
    older |= {"worker_file": "f", "threshold": 4, "concurrencies": [1, 8, 1], "phase_s": 5.0, "requests": 9}
    older |= {"failed_requests": 0, "switches_off": 1, "switches_on": 1}
    facts = RampFacts.model_validate_json(json.dumps(older))
    assert (facts.load, facts.open_loop, facts.name) == ("ramp", None, "v2")


# Figures


@pytest.fixture
def with_a_pause(tmp_path: Path) -> MeasuredRamp:
    """Two steps, 3 s without a request, two steps, 0.6 s of prefill, a step."""
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for number, (t_s, batch) in enumerate([(10.0, 1), (10.1, 2), (13.2, 3), (13.3, 1), (14.0, 1)]):
            step = {"step": number, "t_s": t_s, "batch_size": batch, "tokens": batch, "duration_us": 100_000}
            file.write(json.dumps(step | {"mode": "plain" if batch > 2 else "speculative"}) + "\n")
    requests = _requests((0.0, 0.1, 0.2, 0.5, 0.5, 1, 2, None), (3.4, 3.4, 3.5, 4.4, 4.4, 1, 3, None))
    fields: dict[str, Any] = {"profile": "p", "model": "m", "sglang": "0.5.12", "machine": "x", "worker": "v2"}
    fields |= {"worker_class": "W", "worker_file": "f", "load": "poisson:4", "threshold": 2}
    facts = RampFacts(**fields, requests=2, failed_requests=0, switches_off=1, switches_on=1)
    return MeasuredRamp(facts, read_trace(path), requests)


def test_a_server_without_requests_has_no_batch(with_a_pause: MeasuredRamp) -> None:
    drawn = with_idle(with_a_pause.trace, with_a_pause.requests)
    assert drawn["t_s"].tolist() == pytest.approx([10.0, 10.1, 10.2, 13.2, 13.3, 14.0])
    assert drawn["batch_size"].tolist() == [1, 2, 0, 3, 1, 1]
    assert drawn["tokens"].sum() == with_a_pause.trace["tokens"].sum()


def test_the_timeline_of_an_open_loop(with_a_pause: MeasuredRamp) -> None:
    figure = timelines([with_a_pause])["v2-poisson-4"]
    top, bottom = figure.axes
    assert figure.get_suptitle().startswith("Poisson arrivals, 4 requests/s, on one server, worker v2")
    (batch,) = (line for line in top.lines if line.get_label() == "batch size")
    assert list(batch.get_ydata()) == [1, 2, 0, 3, 1, 1]  # type: ignore[arg-type]
    shaded = [(round(patch.get_x(), 6), round(patch.get_width(), 6)) for patch in top.patches]  # type: ignore[attr-defined]
    assert shaded == [(0.0, 0.2), (3.2, 0.1), (3.3, 0.7)]
    assert list(bottom.lines[0].get_ydata()) == [3, 0, 0, 4]  # type: ignore[arg-type]
    assert "5 decode steps, 2 switches" in figure.get_supxlabel()
    assert "n = 1 run of poisson:4" in figure.get_supxlabel()


def test_recovery_needs_both_sides(with_a_pause: MeasuredRamp) -> None:
    def first(steps: int) -> MeasuredRamp:
        return dataclasses.replace(with_a_pause, trace=with_a_pause.trace[:steps])

    assert recoveries([first(2)]) == {}  # never switched
    assert recoveries([first(3)]) == {}  # switched off, and not on again
    assert list(recoveries([first(5)])) == ["v2-poisson-4"]
