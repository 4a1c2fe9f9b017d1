"""Closed loops: as many requests in flight as a schedule of phases asks for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.load.loop_thread import DEFAULT_STALL_S, CellError
from specdec.load.prompts import Prompt
from specdec.load.request_stream import SAMPLE_S, Ramp, Request, RequestStream
from specdec.servers.server import Server


@dataclass(frozen=True)
class Phase:
    """`concurrency` requests in flight for `duration_s`, or until `requests` of those sent in it ended."""

    concurrency: int
    duration_s: float | None = None
    requests: int | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 0 or (self.duration_s is None) == (self.requests is None):
            raise ValueError(f"{self}: needs a concurrency of 0 or more, and a duration_s or a number of requests")
        if self.concurrency == 0 and self.requests is not None:
            raise ValueError(f"{self}: no request ends at concurrency 0; give a duration_s")


def ramp(
    server: Server,
    phases: Sequence[Phase],
    requests: Sequence[Request],
    sample_s: float | None = SAMPLE_S,
    stall_s: float = DEFAULT_STALL_S,
) -> Ramp:
    """A closed loop whose concurrency follows `phases`; requests in flight when it falls are answered.

    Requests are taken in order, over again when used up. A failed one is a row with its error. Raises
    CellError if no token comes for `stall_s` with requests in flight, ServerDied if the server ends.
    """
    stream = RequestStream(server, stall_s)
    return stream.run(_ClosedLoop(stream, phases, requests).run, sample_s)


def warm_up(server: Server, concurrencies: Sequence[int], prompts: Sequence[Prompt], output_tokens: int = 16) -> None:
    """One round of short requests at each concurrency. Raises CellError if one fails."""
    phases = [Phase(concurrency, requests=concurrency) for concurrency in concurrencies]
    requests = [Request(prompt, output_tokens) for prompt in prompts]
    for error in ramp(server, phases, requests, sample_s=None).requests["error"].dropna():
        raise CellError(f"warm-up: {error}")


@dataclass
class _ClosedLoop:
    """How many requests are wanted in flight, and how many of each phase have ended."""

    stream: RequestStream
    phases: Sequence[Phase]
    requests: Sequence[Request]
    _wanted: int = 0
    _sent: int = 0
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _ended_by_phase: Counter[int | None] = field(default_factory=Counter)

    async def run(self) -> None:
        """All phases, then the requests still in flight."""
        clients: list[asyncio.Task[None]] = []
        for number, phase in enumerate(self.phases):
            self._begin_phase(number, phase.concurrency)
            working = sum(not client.done() for client in clients)
            clients += [self.stream.begin(self._client()) for _ in range(phase.concurrency - working)]
            await self._phase_end(phase)
        self._begin_phase(len(self.phases) - 1, 0)
        await asyncio.gather(*clients)

    def _begin_phase(self, number: int, concurrency: int) -> None:
        self.stream.phase = number
        self.stream.concurrency = self._wanted = concurrency

    async def _phase_end(self, phase: Phase) -> None:
        if phase.duration_s is not None:
            await asyncio.sleep(phase.duration_s)
            return
        assert phase.requests is not None
        while self._ended_by_phase[self.stream.phase] < phase.requests:
            self._ended.clear()
            await self._ended.wait()

    async def _client(self) -> None:
        """Send one request after the other while this many are wanted."""
        while self.stream.in_flight < self._wanted:
            request = self.requests[self._sent % len(self.requests)]
            self._sent += 1
            row = await self.stream.answer(request)
            self._ended_by_phase[row["phase"]] += 1
            self._ended.set()
            if row["error"] is not None:
                await asyncio.sleep(0.5)  # a refusing server is not hammered
