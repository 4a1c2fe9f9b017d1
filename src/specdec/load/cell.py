"""Steady cells on a running server, with SGLang's own bench_serving code.

A cell keeps a fixed number of requests in flight until all its requests are answered. Tokens are the server's
count (`sglang:generation_tokens_total`), never the number of streamed chunks: one chunk can hold several
tokens, and bench_serving counts an empty generation as the length asked for. What the server did meanwhile
(batch sizes, steps, switches, accept length) is the difference of its `specdec` state after and before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.load.bench import RequestTimes, run_bench
from specdec.load.loop_thread import DEFAULT_STALL_S
from specdec.load.prompts import Prompt
from specdec.servers.counters import settled_counts, state_delta, token_counts
from specdec.servers.server import Server


@dataclass(frozen=True)
class Slo:
    """What a request must meet to count as good; None = not asked. Both None: no goodput is computed."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True)
class Measured:
    """The measured columns of a Cell (units and meaning: results.Cell); `error`: the check it failed."""

    duration_s: float
    input_tokens: int
    output_tokens: int
    output_tok_s: float
    total_tok_s: float
    requests_per_s: float
    goodput_requests_per_s: float | None
    ttft_ms_p50: float | None
    ttft_ms_p90: float | None
    ttft_ms_p99: float | None
    tpot_ms_p50: float | None
    tpot_ms_p90: float | None
    tpot_ms_p99: float | None
    e2e_ms_p50: float
    e2e_ms_p90: float
    e2e_ms_p99: float
    achieved_batch_mean: float | None
    achieved_batch_peak: int | None
    accept_length: float | None
    speculative_steps: int | None
    plain_steps: int | None
    plain_step_share: float | None
    switches_off: int | None
    switches_on: int | None
    error: str | None


def run_cell(
    server: Server,
    prompts: Sequence[Prompt],
    concurrency: int,
    output_tokens: int,
    slo: Slo = Slo(),
    stall_s: float = DEFAULT_STALL_S,
) -> Measured:
    """Answer all `prompts`, `concurrency` at a time, each with exactly `output_tokens` greedy tokens.

    The server must be idle before. Raises CellError if a request fails, or if for `stall_s` neither a request
    ends nor the server makes a step; ServerDied if the server ends; KeyboardInterrupt with requests
    cancelled.
    """
    server.flush_cache()
    input_before, output_before = token_counts(server.url)
    state_before = server.state()
    done = run_bench(server, prompts, concurrency, output_tokens, stall_s)
    asked = len(prompts) * output_tokens
    input_count, output_count = settled_counts(server.url, input_before, output_before + asked)
    return summarize(
        done,
        input_tokens=input_count - input_before,
        output_tokens=output_count - output_before,
        asked_tokens=asked,
        slo=slo,
        **state_delta(state_before, server.state()),
    )


def summarize(
    done: Sequence[RequestTimes],
    input_tokens: int,
    output_tokens: int,
    asked_tokens: int,
    slo: Slo,
    **server_side: Any,
) -> Measured:
    """The columns of a cell from its requests, the server's token counts and what `state_delta` says."""
    client_tokens = sum(request.output_tokens for request in done)
    error = None
    if output_tokens != asked_tokens or client_tokens != asked_tokens:
        error = f"output tokens: asked {asked_tokens}, counted {output_tokens} (server), {client_tokens} (client)"
    duration_s = max(r.start_s + r.e2e_s for r in done) - min(r.start_s for r in done)
    return Measured(
        duration_s=duration_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        output_tok_s=output_tokens / duration_s,
        total_tok_s=(input_tokens + output_tokens) / duration_s,
        requests_per_s=len(done) / duration_s,
        goodput_requests_per_s=_goodput(done, slo, duration_s),
        **_percentiles_ms("ttft", [r.ttft_s for r in done]),
        **_percentiles_ms("tpot", [r.tpot_s for r in done]),
        **_percentiles_ms("e2e", [r.e2e_s for r in done]),
        **server_side,
        error=error,
    )


def _percentiles_ms(name: str, seconds: Sequence[float | None]) -> dict[str, Any]:
    known = [value * 1000 for value in seconds if value is not None]
    if not known:
        return {f"{name}_ms_p{p}": None for p in (50, 90, 99)}
    return {f"{name}_ms_p{p}": float(np.percentile(known, p)) for p in (50, 90, 99)}


def _goodput(done: Sequence[RequestTimes], slo: Slo, duration_s: float) -> float | None:
    """Requests within both limits per second. Without a second chunk there is no time per token to miss."""
    if slo.ttft_ms is None and slo.tpot_ms is None:
        return None

    def is_good(request: RequestTimes) -> bool:
        if request.ttft_s is None:
            return False
        fast_start = slo.ttft_ms is None or request.ttft_s * 1000 <= slo.ttft_ms
        fast_tokens = slo.tpot_ms is None or request.tpot_s is None or request.tpot_s * 1000 <= slo.tpot_ms
        return fast_start and fast_tokens

    return sum(is_good(request) for request in done) / duration_s
