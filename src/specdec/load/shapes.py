"""Load shapes by name: what is sent when, decided before a server starts.

Closed loops keep requests in flight: "ramp" (up across the threshold and down, twice), "steps:1,8,32,8,1" (these
concurrencies), "square:2,16,4" (low, high, periods). Open loops send whatever happens: "poisson:8" (requests/s),
"trace:FILE" (trace_file.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.load.lengths import Lengths
from specdec.load.trace_file import read_trace_file
from specdec.servers.profile import ROOT, context_length

SHAPES = '"ramp", "steps:1,8,32,8,1", "square:2,16,4" (low, high, periods), "poisson:8" (requests/s) or "trace:FILE"'
POISSON_PHASES = 10  # how many times phase_s Poisson arrivals last
MOST_REQUESTS_PER_S = 1000.0  # more than one Python client can send
MOST_PHASES = 1000
SPARE_TOKENS = 8  # of the context, that SGLang keeps (scheduler and tp_worker: max_req_len, max_req_input_len)
CLOSED_LOOP_SIZES = 256  # requests of a closed loop that differ; taken over again when used up


@dataclass(frozen=True)
class Size:
    """Tokens of one request. `input_tokens` None: the prompt as it stands in the prompt file."""

    input_tokens: int | None
    output_tokens: int


@dataclass(frozen=True)
class LengthsAsked:
    """Which lengths requests have. `input` None: prompts as they stand in their file."""

    input: Lengths | None
    output: Lengths

    def sizes(self, count: int, seed: int) -> tuple[Size, ...]:
        """The sizes of `count` requests."""
        inputs: list[int | None] = [None] * count
        if self.input is not None:
            inputs = [*self.input.draw(count, f"{seed}-input-tokens")]
        outputs = self.output.draw(count, f"{seed}-output-tokens")
        return tuple(Size(*size) for size in zip(inputs, outputs, strict=True))


@dataclass(frozen=True)
class ClosedLoad:
    """`concurrencies` in flight one after the other, each for `phase_s`."""

    text: str
    lengths: LengthsAsked
    sizes: tuple[Size, ...]  # drawn from `lengths`; taken in order, over again when used up
    concurrencies: tuple[int, ...]
    phase_s: float

    def __str__(self) -> str:
        return f"concurrencies: {', '.join(map(str, self.concurrencies))}; {self.phase_s:g} s each"


@dataclass(frozen=True)
class OpenLoad:
    """A request of each size when it is due, in s since the start, whatever became of those before."""

    text: str
    lengths: LengthsAsked | None  # None: those of a trace
    sizes: tuple[Size, ...]
    due_s: tuple[float, ...]
    duration_s: float  # of the schedule; answers can take longer
    trace_sha256: str | None = None

    @property
    def requests_per_s(self) -> float | None:
        """What the schedule asks for; None if all requests are due at once."""
        return len(self.due_s) / self.duration_s if self.duration_s else None

    def __str__(self) -> str:
        rate = "" if self.requests_per_s is None else f", {self.requests_per_s:.3g} a second"
        return f"{self.text}: {len(self.due_s)} requests in {self.duration_s:g} s{rate}"


Load = ClosedLoad | OpenLoad


def make_load(text: str, threshold: int, peak: int, phase_s: float, lengths: LengthsAsked, seed: int) -> Load:
    """The load that a text names; the same for the same arguments. `peak` is the ramp's alone.

    A trace says its lengths itself. Raises ValueError, one line, for a text that names no load.
    """
    kind, _, rest = text.partition(":")
    if kind == "trace" and rest:
        return _trace(rest)
    if kind == "poisson":
        return _poisson(text, _numbers(text, rest, 1)[0], POISSON_PHASES * phase_s, lengths, seed)
    if text == "ramp":
        concurrencies = phases_across(threshold, peak)
    elif kind == "steps":
        concurrencies = _steps(text, rest)
    elif kind == "square":
        concurrencies = _square(text, rest, threshold)
    else:
        raise ValueError(f"load must be {SHAPES}, got {text!r}")
    return ClosedLoad(text, lengths, lengths.sizes(CLOSED_LOOP_SIZES, seed), concurrencies, phase_s)


def phases_across(threshold: int, peak: int) -> tuple[int, ...]:
    """Concurrencies from 1 over the threshold to `peak` and down again, twice.

    Raises ValueError unless 1 <= threshold < peak: the load must cross the threshold.
    """
    if not 1 <= threshold < peak:
        raise ValueError(
            f"a ramp to {peak} requests does not cross threshold {threshold}: it needs 1 <= threshold < peak"
        )
    up = sorted({1, threshold, min(2 * threshold, peak), peak})
    down = up[-2::-1]
    return (*up, *down, *up[1:], *down)


def poisson_arrivals(requests_per_s: float, duration_s: float, seed: str) -> list[float]:
    """Times in s, from 0 to `duration_s`, with exponential gaps; the same for the same seed."""
    chance = random.Random(seed)
    due_s: list[float] = []
    now_s = chance.expovariate(requests_per_s)
    while now_s < duration_s:
        due_s.append(now_s)
        now_s += chance.expovariate(requests_per_s)
    return due_s


def refuse_too_long(load: Load, flags: Sequence[str]) -> None:
    """Raise ValueError if a request does not fit the --context-length among a server's flags, if it is there."""
    context = context_length(flags)
    if context is None:
        return
    for number, size in enumerate(load.sizes, 1):
        if (size.input_tokens or 0) + size.output_tokens > context - SPARE_TOKENS:
            asked = f"{size.input_tokens or 'its'} input and {size.output_tokens} output tokens"
            raise ValueError(f"load {load.text!r}: request {number} asks {asked} of a --context-length of {context}")


def title(text: str) -> str:
    """A load as figures name it, by its text."""
    kind, _, rest = text.partition(":")
    titles = {"ramp": "A load ramp", "steps": "Steps of load", "square": "A square wave of load"}
    titles |= {"poisson": f"Poisson arrivals, {rest} requests/s,", "trace": f"The trace {rest}"}
    return titles[kind]


def _poisson(text: str, requests_per_s: float, duration_s: float, lengths: LengthsAsked, seed: int) -> OpenLoad:
    if not 0 < requests_per_s <= MOST_REQUESTS_PER_S:
        raise ValueError(f"load {text!r}: the rate must be above 0 and at most {MOST_REQUESTS_PER_S:g} requests/s")
    due_s = poisson_arrivals(requests_per_s, duration_s, f"{seed}-arrivals")
    if not due_s:
        raise ValueError(f"load {text!r} sends no request in {duration_s:g} s: raise the rate or phase_s")
    return OpenLoad(text, lengths, lengths.sizes(len(due_s), seed), tuple(due_s), duration_s)


def _trace(file: str) -> OpenLoad:
    trace = read_trace_file(ROOT / file)  # a relative path starts at the repository, as every parameter's does
    sizes = tuple(Size(request.input_tokens, request.output_tokens) for request in trace.requests)
    due_s = tuple(request.timestamp_s - trace.requests[0].timestamp_s for request in trace.requests)
    return OpenLoad(f"trace:{Path(file).name}", None, sizes, due_s, due_s[-1], trace.sha256)


def _steps(text: str, numbers: str) -> tuple[int, ...]:
    steps = _counts(text, numbers)
    if not any(steps) or len(steps) > MOST_PHASES:
        raise ValueError(f"load {text!r}: it needs 1 to {MOST_PHASES} steps, one of them above 0")
    return steps


def _square(text: str, numbers: str, threshold: int) -> tuple[int, ...]:
    """Low and high in turn, at the end low again: what comes after the last fall belongs to it."""
    low, high, periods = _counts(text, numbers, 3)
    if not 1 <= low <= threshold < high:
        raise ValueError(f"load {text!r} does not cross threshold {threshold}: it needs 1 <= low <= threshold < high")
    if not 1 <= 2 * periods < MOST_PHASES:
        raise ValueError(f"load {text!r}: it needs 1 to {MOST_PHASES // 2 - 1} periods")
    return (*((low, high) * periods), low)


def _counts(text: str, numbers: str, count: int | None = None) -> tuple[int, ...]:
    found = _numbers(text, numbers, count)
    if not all(number.is_integer() and number >= 0 for number in found):
        raise ValueError(f"load {text!r}: its numbers must be integers of 0 or more; known: {SHAPES}")
    return tuple(int(number) for number in found)


def _numbers(text: str, numbers: str, count: int | None = None) -> list[float]:
    """The numbers of a load's text, `count` of them (None: as many as there are)."""
    try:
        found = [float(part) for part in numbers.split(",")]
    except ValueError:
        found = []
    if not found or len(found) != (count or len(found)):
        raise ValueError(f"load must be {SHAPES}, got {text!r}")
    return found
