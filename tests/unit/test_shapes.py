"""Load shapes: what is sent when, for each text; and texts that name no load, refused before a server starts."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest

from specdec.load.lengths import parse_lengths
from specdec.load.shapes import (
    ClosedLoad,
    LengthsAsked,
    Load,
    OpenLoad,
    Size,
    make_load,
    poisson_arrivals,
    refuse_too_long,
    title,
)
from specdec.parameters import ramp_run

LENGTHS = LengthsAsked(None, parse_lengths("output_tokens", "64"))


def make(text: str, lengths: LengthsAsked = LENGTHS, phase_s: float = 3.0, seed: int = 0) -> Load:
    return make_load(text, threshold=4, peak=16, phase_s=phase_s, lengths=lengths, seed=seed)


def make_open(text: str, **options: object) -> OpenLoad:
    load = make(text, **options)  # type: ignore[arg-type]
    assert isinstance(load, OpenLoad)
    return load


@pytest.mark.parametrize(
    ("text", "concurrencies"),
    [
        ("ramp", (1, 4, 8, 16, 8, 4, 1, 4, 8, 16, 8, 4, 1)),
        ("steps:1,8,32,8,1", (1, 8, 32, 8, 1)),
        ("steps:2,0,2", (2, 0, 2)),
        ("square:2,16,4", (2, 16, 2, 16, 2, 16, 2, 16, 2)),
        ("square:4,5,1", (4, 5, 4)),
    ],
)
def test_closed_loops(text: str, concurrencies: tuple[int, ...]) -> None:
    load = make(text)
    assert isinstance(load, ClosedLoad)
    assert load.concurrencies == concurrencies
    assert load.phase_s == 3.0
    assert set(load.sizes) == {Size(None, 64)}


# Poisson arrivals: the schedule's statistics; nothing is timed


def test_poisson_arrivals_come_at_their_rate_and_independently() -> None:
    due_s = poisson_arrivals(8.0, 2000.0, "seed")
    assert len(due_s) == pytest.approx(16_000, abs=4 * 16_000**0.5)
    gaps = [b - a for a, b in itertools.pairwise(due_s)]
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.05)  # exponential: as large as the mean
    in_each_s = [0] * 2000
    for time_s in due_s:
        in_each_s[int(time_s)] += 1
    assert statistics.variance(in_each_s) == pytest.approx(8, rel=0.15)  # Poisson: as large as the mean


def test_a_poisson_load_lasts_ten_phases_and_is_the_seeds() -> None:
    load = make_open("poisson:8", phase_s=30.0)
    assert load.duration_s == 300.0
    assert 0 < load.due_s[0] < load.due_s[-1] < 300
    assert list(load.due_s) == sorted(load.due_s)
    assert load.requests_per_s == pytest.approx(8, rel=0.1)
    assert len(load.sizes) == len(load.due_s)
    assert load.due_s == make_open("poisson:8", phase_s=30.0).due_s
    assert load.due_s != make_open("poisson:8", phase_s=30.0, seed=1).due_s
    assert load.trace_sha256 is None


def test_lengths_are_the_seeds_whatever_the_rate() -> None:
    lengths = LengthsAsked(parse_lengths("i", "uniform:16,128"), parse_lengths("o", "lognormal:64,0.5"))
    few, many = make_open("poisson:1", lengths=lengths), make_open("poisson:8", lengths=lengths)
    assert few.sizes == many.sizes[: len(few.sizes)]
    assert few.sizes != make_open("poisson:1", lengths=lengths, seed=1).sizes[: len(few.sizes)]
    assert all(16 <= (size.input_tokens or 0) <= 128 for size in many.sizes)
    alike = LengthsAsked(*[parse_lengths("o", "uniform:1,1000")] * 2)
    pairs = make_open("poisson:8", lengths=alike).sizes
    assert sum(pair.input_tokens == pair.output_tokens for pair in pairs) < 0.1 * len(pairs)


# Traces


def test_a_trace_is_replayed_in_its_order_with_its_lengths(tmp_path: Path) -> None:
    path = tmp_path / "day.csv"
    path.write_text("timestamp,input_tokens,output_tokens\n1000.5,30,3\n1000.5,20,5\n1004.5,10,7\n")
    load = make_open(f"trace:{path}")
    assert load.due_s == (0.0, 0.0, 4.0)
    assert load.sizes == (Size(30, 3), Size(20, 5), Size(10, 7))
    assert load.requests_per_s == 3 / 4
    assert load.text == "trace:day.csv"  # no folder of this machine
    assert load.lengths is None
    assert len(load.trace_sha256 or "") == 64


def test_a_trace_of_one_moment_has_no_rate(tmp_path: Path) -> None:
    path = tmp_path / "burst.jsonl"
    path.write_text('{"timestamp": 7, "input_tokens": 2, "output_tokens": 2}\n' * 3)
    load = make_open(f"trace:{path}")
    assert load.requests_per_s is None
    assert str(load) == "trace:burst.jsonl: 3 requests in 0 s"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ramp", "A load ramp"),
        ("steps:1,8", "Steps of load"),
        ("square:1,8,2", "A square wave of load"),
        ("poisson:0.5", "Poisson arrivals, 0.5 requests/s,"),
        ("trace:day.csv", "The trace day.csv"),
    ],
)
def test_titles(text: str, words: str) -> None:
    assert title(text) == words


# Refused in one line, before anything starts

RUN = {"profile": "cpu-tiny", "workers": "v1", "threshold": 4, "out": "results/none"}


@pytest.fixture
def _release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.parameters.installed_release", lambda: "0.5.12")


@pytest.mark.usefixtures("_release")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        *(
            ({"load": text}, f'load must be "ramp", "steps:1,8,32,8,1", "square:2,16,4" (low, high, periods), '
             f'"poisson:8" (requests/s) or "trace:FILE", got {text!r}')
            for text in (
                *("wave", "ramp:4", "Ramp", "steps", "steps:", "steps:1,,2", "steps:a", "square:2,16"),
                *("square:2,16,4,1", "poisson", "poisson:", "poisson:8,2", "poisson:fast", "trace", "trace:", ":"),
            )
        ),
        ({"load": ""}, "load must be a text"),
        ({"load": "steps:1.5,2"}, "its numbers must be integers of 0 or more"),
        ({"load": "steps:1,-2"}, "its numbers must be integers of 0 or more"),
        ({"load": "steps:0,0"}, "it needs 1 to 1000 steps, one of them above 0"),
        ({"load": "steps:" + "1," * 1000 + "1"}, "it needs 1 to 1000 steps"),
        ({"load": "square:5,16,4"}, "does not cross threshold 4"),
        ({"load": "square:2,4,4"}, "does not cross threshold 4"),
        ({"load": "square:0,8,4"}, "it needs 1 <= low <= threshold < high"),
        ({"load": "square:2,8,0"}, "it needs 1 to 499 periods"),
        ({"load": "poisson:0"}, "the rate must be above 0 and at most 1000 requests/s"),
        ({"load": "poisson:-1"}, "the rate must be above 0"),
        ({"load": "poisson:nan"}, "the rate must be above 0"),
        ({"load": "poisson:1e9"}, "the rate must be above 0"),
        ({"load": "poisson:0.0001"}, "sends no request in 30 s: raise the rate or phase_s"),
        ({"load": "trace:none.csv"}, "none.csv: No such file"),
        ({"load": "poisson:8", "peak": 16}, "peak belongs to load 'ramp', not to 'poisson:8'"),
        ({"load": "steps:1,8", "peak": 16}, "peak belongs to load 'ramp'"),
        ({"load": "trace:none.csv", "output_tokens": "8"}, "a trace says its lengths itself"),
        ({"load": "trace:none.csv", "input_tokens": "8"}, "a trace says its lengths itself"),
        ({"input_tokens": "many"}, "input_tokens must be"),
        ({"output_tokens": "uniform:9,5"}, "output_tokens must be"),
        ({"output_tokens": "5000"}, "request 1 asks its input and 5000 output tokens of a --context-length of 2048"),
        ({"slo_ttft_ms": -1.0}, "slo_ttft_ms must be a number above 0"),
        ({"seed": -1}, "seed must be an integer of 0 or more"),
    ],
)  # fmt: skip
def test_a_bad_load_is_one_line(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=r".+") as error:
        ramp_run(**{**RUN, **given})  # type: ignore[arg-type]
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("_release")
def test_a_run_says_what_it_will_send() -> None:
    run = ramp_run(**RUN, load="poisson:4", output_tokens="uniform:8,16", slo_ttft_ms=500.0)  # type: ignore[arg-type]
    assert isinstance(run.load, OpenLoad)
    assert all(8 <= size.output_tokens <= 16 for size in run.load.sizes)
    assert run.plan.slo.ttft_ms == 500.0
    assert f"poisson:4: {len(run.load.due_s)} requests in 30 s, " in str(run)
    assert "concurrencies: 1, 8; 3 s each" in str(ramp_run(**RUN, load="steps:1,8"))  # type: ignore[arg-type]


def test_requests_must_fit_the_context() -> None:
    lengths = LengthsAsked(parse_lengths("i", "100"), parse_lengths("o", "20"))
    load = make("steps:1,2", lengths)
    refuse_too_long(load, ["--context-length", "128"])
    refuse_too_long(load, ["--tp-size", "8"])  # the context is the model's, which is not known here
    with pytest.raises(ValueError, match="request 1 asks 100 input and 20 output tokens of a --context-length of 127"):
        refuse_too_long(load, ["--context-length", "127"])
