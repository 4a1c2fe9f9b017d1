"""Requests to one server, streamed: what comes of each, and what the server says of itself meanwhile.

When a request is sent is decided elsewhere: by a closed loop (closed_loop.py) or an open one (open_loop.py).
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import aiohttp
import pandas as pd

from specdec.load.loop_thread import run_in_thread, stalled
from specdec.load.prompts import Prompt
from specdec.servers.counters import state_delta
from specdec.servers.server import Server

SAMPLE_S = 0.25  # between two readings of the server's state


@dataclass(frozen=True)
class Request:
    """A prompt, and the greedy tokens to answer it with: exactly so many."""

    prompt: Prompt
    output_tokens: int


@dataclass(frozen=True)
class Ramp:
    """What a load gave; times in s since its start.

    requests: phase, due_s (when an open loop was to send it; missing in a closed loop), start_s (when it was
      sent), first_token_s, last_token_s, end_s, input_tokens, first_tokens (those that came with the first),
      output_tokens, error. samples: t_s, phase, concurrency (asked; missing in an open loop), batch_size,
      mode, threshold, switches_off, switches_on (both since the start), accept_length (since the sample
      before; speculative steps only) and output_tok_s (tokens received since the sample before).
    """

    requests: pd.DataFrame
    samples: pd.DataFrame


REQUEST_COLUMNS = {
    **{"phase": "Int64", "due_s": "float64", "start_s": "float64", "first_token_s": "float64"},
    **{"last_token_s": "float64", "end_s": "float64", "input_tokens": "Int64", "first_tokens": "Int64"},
    **{"output_tokens": "Int64", "error": "string"},
}
SAMPLE_COLUMNS = {
    **{"t_s": "float64", "phase": "Int64", "concurrency": "Int64", "batch_size": "Int64", "mode": "string"},
    **{"threshold": "Int64", "switches_off": "Int64", "switches_on": "Int64"},
    **{"accept_length": "float64", "output_tok_s": "float64"},
}


class RequestStream:
    """One load on one server: sends requests, and keeps a row of each and samples of the server's state."""

    def __init__(self, server: Server, stall_s: float) -> None:
        self.phase: int | None = None  # that requests and samples are written down under
        self.concurrency: int | None = None  # asked for by a closed loop
        self.in_flight = 0
        self._server = server
        self._stall_s = stall_s
        self._requests: list[dict[str, Any]] = []
        self._samples: list[dict[str, Any]] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._began_s = time.perf_counter()
        self._tokens = 0
        self._token_s = time.monotonic()
        self._last: dict[str, Any] = {}  # the sample before: time, tokens, state; the first state

    def run(self, load: Callable[[], Awaitable[None]], sample_s: float | None = SAMPLE_S) -> Ramp:
        """Run `load`, which sends by `answer`; the state is read every `sample_s` (None: not at all).

        Raises CellError if no token comes for `stall_s` with requests in flight, ServerDied if the server
        ends.
        """
        run_in_thread(functools.partial(self._run, load, sample_s), self._watch)
        requests, samples = pd.DataFrame(self._requests), pd.DataFrame(self._samples)
        return Ramp(
            requests.reindex(columns=list(REQUEST_COLUMNS)).astype(REQUEST_COLUMNS),
            samples.reindex(columns=list(SAMPLE_COLUMNS)).astype(SAMPLE_COLUMNS),
        )

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that does not outlive the load."""
        self._tasks.append(asyncio.create_task(work))
        return self._tasks[-1]

    def now_s(self) -> float:
        """Seconds since the load began."""
        return time.perf_counter() - self._began_s

    async def answer(self, request: Request, due_s: float | None = None) -> dict[str, Any]:
        """Send a request now and wait for its answer; its row. A failed request is a row with its error."""
        row: dict[str, Any] = dict.fromkeys(REQUEST_COLUMNS)
        row |= {"phase": self.phase, "due_s": due_s, "start_s": self.now_s(), "output_tokens": 0}
        self.in_flight += 1
        if self.in_flight == 1:
            self._token_s = time.monotonic()
        try:
            await self._receive(request, row)
        except (aiohttp.ClientError, ConnectionError, ValueError) as error:
            row["error"] = f"{type(error).__name__}: {error}"
        self.in_flight -= 1
        row["end_s"] = self.now_s()
        self._requests.append(row)
        return row

    async def _receive(self, request: Request, row: dict[str, Any]) -> None:
        """The stream of one answer into its row. Raises ConnectionError for one that is not as asked."""
        prompt, tokens = request.prompt, request.output_tokens
        body = {
            "text" if isinstance(prompt, str) else "input_ids": prompt,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True},
            "stream": True,
        }
        async with self._session.post(f"{self._server.url}/generate", json=body) as response:
            if response.status != 200:
                raise ConnectionError(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                self._take_chunk(line, row)
        if row["output_tokens"] != tokens:
            raise ConnectionError(f"{row['output_tokens']} tokens, asked {tokens}")

    def _take_chunk(self, line: bytes, row: dict[str, Any]) -> None:
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
        row["input_tokens"] = meta.get("prompt_tokens", row["input_tokens"])
        new_tokens = meta.get("completion_tokens", 0) - row["output_tokens"]
        if new_tokens <= 0:
            return
        now_s = self.now_s()
        if row["output_tokens"] == 0:
            row |= {"first_token_s": now_s, "first_tokens": new_tokens}
        row["last_token_s"] = now_s
        row["output_tokens"] += new_tokens
        self._tokens += new_tokens
        self._token_s = time.monotonic()

    def _watch(self) -> None:
        if not self._server.running():
            self._server.state()  # raises ServerDied with the log
        if self.in_flight and time.monotonic() - self._token_s > self._stall_s:
            raise stalled(self._server, self._stall_s)

    async def _run(self, load: Callable[[], Awaitable[None]], sample_s: float | None) -> None:
        """The load beside the samples. No task outlives this, however it ends."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=2**20) as self._session:
            try:
                if sample_s is not None:
                    self.begin(self._sample(sample_s))
                await load()
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        if sample_s is not None:
            await self._add_sample()

    async def _sample(self, sample_s: float) -> None:
        """Read the state at fixed times, a late one at once."""
        due_s = self.now_s()
        while True:
            await self._add_sample()
            due_s += sample_s
            await asyncio.sleep(max(0.0, due_s - self.now_s()))

    async def _add_sample(self) -> None:
        last = self._last
        try:
            state = await asyncio.to_thread(self._server.state) or {}
        except ConnectionError:  # slow under load: the sample has the client's side only
            state = {}
        now_s = self.now_s()
        sample: dict[str, Any] = {"t_s": now_s, "phase": self.phase, "concurrency": self.concurrency}
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
        self._samples.append(sample)
