"""Ramps: a closed loop whose concurrency follows a schedule, with the state of its server."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pandas as pd

from specdec.counters import state_delta
from specdec.loop_thread import DEFAULT_STALL_S, CellError, run_in_thread, stalled
from specdec.prompts import Prompt
from specdec.server import Server


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


@dataclass(frozen=True)
class Ramp:
    """What a ramp gave; times in s since its start.

    requests: phase, start_s, first_token_s, last_token_s, end_s, input_tokens, output_tokens, error. samples:
    t_s, phase, concurrency (asked), batch_size, mode, threshold, switches_off, switches_on (both since the
      ramp began), accept_length (since the sample before; speculative steps only) and output_tok_s (tokens
      received since the sample before).
    """

    requests: pd.DataFrame
    samples: pd.DataFrame


REQUEST_COLUMNS = {
    **{"phase": "Int64", "start_s": "float64", "first_token_s": "float64", "last_token_s": "float64"},
    **{"end_s": "float64", "input_tokens": "Int64", "output_tokens": "Int64", "error": "string"},
}
SAMPLE_COLUMNS = {
    **{"t_s": "float64", "phase": "Int64", "concurrency": "Int64", "batch_size": "Int64", "mode": "string"},
    **{"threshold": "Int64", "switches_off": "Int64", "switches_on": "Int64"},
    **{"accept_length": "float64", "output_tok_s": "float64"},
}


def ramp(
    server: Server,
    phases: Sequence[Phase],
    prompts: Sequence[Prompt],
    output_tokens: int,
    sample_s: float = 0.25,
    stall_s: float = DEFAULT_STALL_S,
) -> Ramp:
    """A closed loop whose concurrency follows `phases`; requests in flight when it falls are answered.

    Prompts are taken in order, over again when used up. The state is read every `sample_s`. A failed request
    is a row with its error. Raises CellError if no token comes for `stall_s` with requests in flight,
    ServerDied if the server ends.
    """
    loop = _ClosedLoop(server, prompts, output_tokens, stall_s)
    run_in_thread(functools.partial(loop.run, phases, sample_s), loop.watch)
    requests, samples = pd.DataFrame(loop.requests), pd.DataFrame(loop.samples)
    return Ramp(
        requests.reindex(columns=list(REQUEST_COLUMNS)).astype(REQUEST_COLUMNS),
        samples.reindex(columns=list(SAMPLE_COLUMNS)).astype(SAMPLE_COLUMNS),
    )


def warm_up(server: Server, concurrencies: Sequence[int], prompts: Sequence[Prompt], output_tokens: int = 16) -> None:
    """One round of short requests at each concurrency. Raises CellError if one fails."""
    loop = _ClosedLoop(server, prompts, output_tokens, DEFAULT_STALL_S)
    phases = [Phase(concurrency, requests=concurrency) for concurrency in concurrencies]
    run_in_thread(functools.partial(loop.run, phases, None), loop.watch)
    for request in loop.requests:
        if request["error"] is not None:
            raise CellError(f"warm-up: {request['error']}")


@dataclass
class _ClosedLoop:
    """The state of one ramp: how many requests are wanted in flight, and what has come of them."""

    server: Server
    prompts: Sequence[Prompt]
    output_tokens: int
    stall_s: float
    requests: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    _began_s: float = field(default_factory=time.perf_counter)
    _phase: int = 0
    _target: int = 0
    _sent: int = 0
    _in_flight: int = 0
    _tokens: int = 0
    _token_s: float = field(default_factory=time.monotonic)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _ended_by_phase: Counter[int] = field(default_factory=Counter)
    _last: dict[str, Any] = field(default_factory=dict)  # the sample before: time, tokens, state; the first state

    def watch(self) -> None:
        """Raises CellError on a stall, ServerDied if the server has ended."""
        if not self.server.running():
            self.server.state()  # raises ServerDied with the log
        if self._in_flight and time.monotonic() - self._token_s > self.stall_s:
            raise stalled(self.server, self.stall_s)

    async def run(self, phases: Sequence[Phase], sample_s: float | None) -> None:
        """All phases, then the requests still in flight. No task outlives this, however it ends."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        connector = aiohttp.TCPConnector(limit=0)
        tasks: list[asyncio.Task[None]] = []
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=2**20) as session:
            try:
                if sample_s is not None:
                    tasks.append(asyncio.create_task(self._sample(sample_s)))
                await self._run_phases(phases, session, tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        if sample_s is not None:
            await self._add_sample()

    async def _run_phases(
        self, phases: Sequence[Phase], session: aiohttp.ClientSession, tasks: list[asyncio.Task[None]]
    ) -> None:
        """Start the clients that each phase needs (into `tasks`), and wait for them all at the end."""
        clients: list[asyncio.Task[None]] = []
        for number, phase in enumerate(phases):
            self._phase, self._target = number, phase.concurrency
            working = sum(not client.done() for client in clients)
            for _ in range(phase.concurrency - working):
                clients.append(asyncio.create_task(self._client(session)))
                tasks.append(clients[-1])
            await self._phase_end(phase)
        self._target = 0
        await asyncio.gather(*clients)

    async def _phase_end(self, phase: Phase) -> None:
        if phase.duration_s is not None:
            await asyncio.sleep(phase.duration_s)
            return
        assert phase.requests is not None
        while self._ended_by_phase[self._phase] < phase.requests:
            self._ended.clear()
            await self._ended.wait()

    async def _client(self, session: aiohttp.ClientSession) -> None:
        """Send one request after the other while this many are wanted."""
        while self._in_flight < self._target:
            prompt = self.prompts[self._sent % len(self.prompts)]
            self._sent += 1
            self._in_flight += 1
            if self._in_flight == 1:
                self._token_s = time.monotonic()
            record = await self._request(session, prompt)
            self._in_flight -= 1
            self.requests.append(record)
            self._ended_by_phase[record["phase"]] += 1
            self._ended.set()
            if record["error"] is not None:
                await asyncio.sleep(0.5)  # a refusing server is not hammered

    async def _request(self, session: aiohttp.ClientSession, prompt: Prompt) -> dict[str, Any]:
        record: dict[str, Any] = dict.fromkeys(REQUEST_COLUMNS)
        record |= {"phase": self._phase, "start_s": self._now_s(), "output_tokens": 0}
        body = {
            "text" if isinstance(prompt, str) else "input_ids": prompt,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": self.output_tokens, "ignore_eos": True},
            "stream": True,
        }
        try:
            async with session.post(f"{self.server.url}/generate", json=body) as response:
                if response.status != 200:
                    raise ConnectionError(f"HTTP {response.status}: {(await response.text())[:300]}")
                async for line in response.content:
                    self._take_chunk(line, record)
            if record["output_tokens"] != self.output_tokens:
                raise ConnectionError(f"{record['output_tokens']} tokens, asked {self.output_tokens}")
        except (aiohttp.ClientError, ConnectionError, ValueError) as error:
            record["error"] = f"{type(error).__name__}: {error}"
        record["end_s"] = self._now_s()
        return record

    def _take_chunk(self, line: bytes, record: dict[str, Any]) -> None:
        """One line of the stream. Tokens are `completion_tokens`: a text can be empty or several tokens."""
        line = line.strip()
        if not line.startswith(b"data:") or line == b"data: [DONE]":
            return
        chunk = json.loads(line[5:])
        if "error" in chunk:  # an error can come as an event of an answer with status 200
            raise ConnectionError(str(chunk["error"]))
        meta = chunk.get("meta_info") or {}
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise ConnectionError(f"aborted: {reason.get('message')}")
        record["input_tokens"] = meta.get("prompt_tokens", record["input_tokens"])
        new_tokens = meta.get("completion_tokens", 0) - record["output_tokens"]
        if new_tokens <= 0:
            return
        now_s = self._now_s()
        if record["output_tokens"] == 0:
            record["first_token_s"] = now_s
        record["last_token_s"] = now_s
        record["output_tokens"] += new_tokens
        self._tokens += new_tokens
        self._token_s = time.monotonic()

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s

    async def _sample(self, sample_s: float) -> None:
        """Read the state at fixed times, a late one at once."""
        due_s = self._now_s()
        while True:
            await self._add_sample()
            due_s += sample_s
            await asyncio.sleep(max(0.0, due_s - self._now_s()))

    async def _add_sample(self) -> None:
        last = self._last
        try:
            state = await asyncio.to_thread(self.server.state) or {}
        except ConnectionError:  # slow under load: the sample has the client's side only
            state = {}
        now_s = self._now_s()
        sample: dict[str, Any] = {"t_s": now_s, "phase": self._phase, "concurrency": self._target}
        sample |= {name: state.get(name) for name in ("batch_size", "mode", "threshold")}
        if state:
            first = last.setdefault("first", state)
            for name in ("switches_off", "switches_on"):
                sample[name] = state[name] - first[name]
            sample["accept_length"] = state_delta(last.get("state"), state)["accept_length"]
            last["state"] = state
        if "t_s" in last:
            sample["output_tok_s"] = (self._tokens - last["tokens"]) / (now_s - last["t_s"])
        last |= {"t_s": now_s, "tokens": self._tokens}
        self.samples.append(sample)
