"""A fake SGLang server in this process, for what the client does with an answer: no model, no sglang.

It speaks /generate (streaming), /metrics, /server_info and /health on a free port, and stands in for
`specdec.servers.server.Server`, whose methods it has. `Behaviour` makes it misbehave.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from specdec.load.loop_thread import _end_loop
from specdec.servers.server import ServerDied, ServerPlan

FAKE_PLAN = ServerPlan("static", "v1", ["/usr/bin/python", "-m", "fake", "--port", "{port}"], {})


@dataclass
class Behaviour:
    """How answers come; by default one token per chunk as fast as can be."""

    tokens_per_chunk: int = 1
    empty_first_text: bool = False  # the first token has no text yet (a part of a character)
    role_chunk: bool = False  # a chunk without a token before the first
    no_text: bool = False  # tokens are counted, but no text comes
    missing_tokens: int = 0  # tokens fewer than asked, per request
    miscounted_tokens: int = 0  # added to the server's count, per request
    metric_lag_s: float = 0.0
    most_running: int | None = None  # requests that it admits at once
    adaptive_dropped: bool = False  # the server runs without SGLang's own switch though it was asked for
    error_event: bool = False  # an error as an event of an answer with status 200
    stall_from_request: int | None = None  # from this request on no token comes, health stays 200
    hangs_in_stall: bool = False  # then its state is not answered either
    die_at_request: int | None = None  # the server is gone in the middle of this request
    gap: Callable[[int], Any] = field(default=lambda index: asyncio.sleep(0))  # before chunk `index`


class FakeServer:
    """A running fake; `stop` ends it. Counts decode steps by the requests in flight, as batch size."""

    def __init__(self, behaviour: Behaviour | None = None, plan: ServerPlan = FAKE_PLAN) -> None:
        self.behaviour = behaviour or Behaviour()
        self.plan = plan
        self.threshold: int | None = None
        self.requests: list[dict[str, Any]] = []  # bodies, in order of arrival
        self.most_in_flight = 0
        self.calls: Counter[str] = Counter()
        self._steps: Counter[int] = Counter()
        self._mode_steps: Counter[str] = Counter()
        self._switches: Counter[str] = Counter()
        self._mode = "speculative"
        self._speculative = {"tokens": 0, "request_steps": 0}
        self._in_flight = 0
        self._stalled = False
        self._counted = {"prompt": 0, "generation": 0}
        self._alive = True
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    # What Server has

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def running(self) -> bool:
        return self._alive

    def stop(self) -> None:
        if self._alive:  # else it has died and is ending by itself
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._alive = False

    def health(self) -> bool:
        return self._alive

    def log_tail(self, n: int = 20) -> str:
        return "the last line of the log"

    def flush_cache(self) -> None:
        self._check()
        self.calls["flush_cache"] += 1

    def set_threshold(self, threshold: int | None) -> None:
        self._check()
        self.threshold = threshold

    def info(self) -> dict[str, Any]:
        self._check()
        is_baseline = self.plan.worker == "none"
        return {
            "version": "0.5.12",
            "speculative_eagle_topk": None if is_baseline else 4,
            "speculative_num_steps": None if is_baseline else 3,
            "speculative_num_draft_tokens": None if is_baseline else 16,
            "internal_states": [{"specdec": self.state(), "effective_max_running_requests_per_dp": 32}],
        }

    def state(self, timeout_s: float = 30.0) -> dict[str, Any]:
        self._check()
        if self.behaviour.hangs_in_stall and self._stalled:
            time.sleep(timeout_s)
            raise ConnectionError("timed out")
        is_baseline, adaptive = self.plan.worker == "none", self.plan.arm == "adaptive"
        return {
            "active": not (is_baseline or adaptive),
            "adaptive": adaptive and not self.behaviour.adaptive_dropped,
            "worker_class": None if is_baseline else "EAGLEWorker",
            "worker_file": None if is_baseline else "sglang/srt/speculative/eagle_worker.py",
            "overlap": False,
            "threshold": self.threshold,
            "resume_threshold": self.threshold,
            "dwell_steps": 1,
            "mode": self._mode,
            "batch_size": self._in_flight,
            "speculative_steps": self._mode_steps["speculative"],
            "plain_steps": self._mode_steps["plain"],
            "switches_off": self._switches["plain"],
            "switches_on": self._switches["speculative"],
            "speculative_tokens": self._speculative["tokens"],
            "speculative_request_steps": self._speculative["request_steps"],
            "steps_by_batch_size": {str(size): count for size, count in self._steps.items()},
        }

    # The server

    def _check(self) -> None:
        if not self._alive:
            raise ServerDied("fake server ended; log:\nthe last line of the log")

    def _serve(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        application = web.Application()
        application.add_routes(
            [
                web.post("/generate", self._generate),
                web.get("/metrics", self._metrics),
                web.get("/server_info", self._server_info),
                web.get("/health", self._server_info),
            ]
        )
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        _end_loop(self._loop)

    async def _metrics(self, _: web.Request) -> web.Response:
        lines = [f'sglang:{name}_tokens_total{{rank="0"}} {count}' for name, count in self._counted.items()]
        return web.Response(text="# HELP sglang:generation_tokens_total Tokens\n" + "\n".join(lines) + "\n")

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.requests)
        self.requests.append(body)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            return await self._answer(request, body, number)
        finally:
            self._in_flight -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], number: int) -> web.StreamResponse:
        how = self.behaviour
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if how.error_event:
            await response.write(b'data: {"error": {"message": "out of memory"}}\n\n')
            return response
        if how.role_chunk:
            await response.write(_event({"text": "", "meta_info": {"completion_tokens": 0}}))
        tokens = body["sampling_params"]["max_new_tokens"] - how.missing_tokens
        given, chunk = 0, 0
        while given < tokens:
            if how.stall_from_request is not None and number >= how.stall_from_request:
                self._stalled = True
                await asyncio.sleep(3600)
            if how.die_at_request == number and chunk == 1:
                self._alive = False
                request.transport.abort()
                self._loop.stop()
                await asyncio.sleep(3600)
            await how.gap(chunk)
            new = min(how.tokens_per_chunk, tokens - given)
            given += new
            self._step(new)
            text = "" if how.no_text or (how.empty_first_text and chunk == 0) else "x" * given
            await response.write(_event({"text": text, "meta_info": {"completion_tokens": given, "prompt_tokens": 7}}))
            chunk += 1
        self._loop.call_later(how.metric_lag_s, self._count, 7, given + how.miscounted_tokens)
        await response.write(b"data: [DONE]\n\n")
        return response

    def _step(self, new_tokens: int) -> None:
        plain = self.threshold is not None and self._in_flight > self.threshold
        mode = "plain" if plain else "speculative"
        self._switches[mode] += mode != self._mode
        self._mode = mode
        batch_size = min(self._in_flight, self.behaviour.most_running or self._in_flight)
        self._steps[batch_size] += 1
        self._mode_steps[mode] += 1
        if not plain:
            self._speculative["tokens"] += new_tokens
            self._speculative["request_steps"] += 1

    def _count(self, prompt_tokens: int, generated_tokens: int) -> None:
        self._counted["prompt"] += prompt_tokens
        self._counted["generation"] += generated_tokens


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


class SteppedClock:
    """A clock that stands still between chunks: `advance` moves it, then waits until a client has read it.

    Replaces the module `time` in the client's code, so that its timings are exact on any machine.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.reads = 0
        self.sleep = time.sleep

    def perf_counter(self) -> float:
        self.reads += 1
        return self.now_s

    def monotonic(self) -> float:
        return time.monotonic()

    async def advance(self, seconds: float) -> None:
        await self.settle()
        self.now_s += seconds

    async def settle(self) -> None:
        """Until nobody has read the clock for 50 ms: what was sent before has been looked at."""
        seen = -1
        while seen != self.reads:
            seen = self.reads
            await asyncio.sleep(0.05)
