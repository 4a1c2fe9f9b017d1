"""Requests to a real server, as many at once as a scenario needs, and their tokens."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [json.loads(line) for line in (ROOT / "env/tiny_pair/prompts_heldout.jsonl").read_text().splitlines()]


@dataclass(frozen=True)
class Request:
    """One generation: greedy and of fixed length unless `sampling` says otherwise."""

    ids: list[int]
    max_new_tokens: int = 48
    delay_s: float = 0.0  # after the scenario's start
    abort_after_s: float | None = None  # close the connection then; the answer is None
    sampling: dict[str, Any] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)  # beside the sampling parameters

    def payload(self) -> dict[str, Any]:
        fixed = {"temperature": 0, "max_new_tokens": self.max_new_tokens, "ignore_eos": True}
        return {"input_ids": self.ids, "sampling_params": fixed | self.sampling} | self.body


def prompt(number: int, length: int = 32) -> list[int]:
    """The held-out prompt of that number (they repeat), cut or strung together to `length` tokens."""
    ids: list[int] = []
    while len(ids) < length:
        ids += PROMPTS[number % len(PROMPTS)]["ids"]
        number += 7
    return ids[:length]


def generate(url: str, requests: Sequence[Request], concurrency: int | None = None) -> list[dict[str, Any] | None]:
    """Send all requests, each at its delay, `concurrency` at once at most. Answers in order; None: aborted."""
    return asyncio.run(_generate(url, requests, concurrency or len(requests)))


def tokens(answers: Sequence[dict[str, Any] | None]) -> list[list[int] | None]:
    return [answer["output_ids"] if answer is not None else None for answer in answers]


_KNOWN: dict[str, dict[str, Any]] = {}  # greedy answers of the baseline, by request


def baseline_answers(url: str, requests: Sequence[Request]) -> list[dict[str, Any]]:
    """The baseline's answers to greedy requests, in order. Each is asked for once: it would answer the same again."""
    keys = [json.dumps(request.payload()) for request in requests]
    new = {key: replace(request, delay_s=0.0) for key, request in zip(keys, requests, strict=True) if key not in _KNOWN}
    if new:
        for key, answer in zip(new, generate(url, list(new.values())), strict=True):
            assert answer is not None
            _KNOWN[key] = answer
    return [_KNOWN[key] for key in keys]


async def _generate(url: str, requests: Sequence[Request], concurrency: int) -> list[dict[str, Any] | None]:
    gate = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=240)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def one(request: Request) -> dict[str, Any] | None:
            await asyncio.sleep(request.delay_s)
            async with gate:
                post = _post(session, url, request.payload())
                if request.abort_after_s is None:
                    return await post
                try:
                    await asyncio.wait_for(post, request.abort_after_s)
                except TimeoutError:
                    return None
                raise AssertionError("the request ended before it could be aborted; make it longer")

        return await asyncio.gather(*(one(request) for request in requests))


async def _post(session: aiohttp.ClientSession, url: str, payload: dict[str, Any]) -> dict[str, Any]:
    async with session.post(f"{url}/generate", json=payload) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer
