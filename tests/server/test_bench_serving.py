"""Our numbers of a cell beside those that SGLang's bench_serving makes of the very same requests.

Case 14. Both come from one run, so that the noise of the machine is in neither comparison. Where they mean
different things:

- duration: bench_serving's clock also runs while it asks the server for its state afterwards; that is taken off here.
- output tokens: ours are the server's counter, bench_serving's what the client read. Its "retokenized" count, and
  what it says of input tokens, come from a tokenizer that we do not give it.
- time per output token: bench_serving spreads last byte minus first token over the tokens but one, also where the first
  chunk held several; ours is last token minus first token, over the tokens after the first chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
from client import prompt

from specdec.load.bench import bench_module
from specdec.load.cell import Measured, run_cell
from specdec.servers.server import Server

pytestmark = pytest.mark.sglang

WITHIN = 0.03
CONCURRENCY, REQUESTS, TOKENS = 4, 12, 64
Compare = Callable[[Server], tuple[Measured, dict[str, Any]]]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Runs a cell; our row, and what bench_serving returned, with `asking_s`: its question after the load."""
    bench = bench_module()
    benchmark, get = bench.benchmark, bench.requests.get
    results: list[dict[str, Any]] = []
    asking_s: list[float] = []

    async def kept(**arguments: Any) -> dict[str, Any]:
        results.append(await benchmark(**arguments))
        return results[-1]

    def timed(*where: Any, **how: Any) -> Any:
        began_s = time.perf_counter()
        answer = get(*where, **how)
        asking_s.append(time.perf_counter() - began_s)
        return answer

    monkeypatch.setattr(bench, "benchmark", kept)
    monkeypatch.setattr(bench.requests, "get", timed)

    def run(server: Server) -> tuple[Measured, dict[str, Any]]:
        prompts = [tuple(prompt(number)) for number in range(REQUESTS)]
        cell = run_cell(server, prompts, CONCURRENCY, TOKENS)
        (theirs,) = results
        return cell, theirs | {"asking_s": asking_s[0]}

    return run


def test_a_baseline(baseline: Server, measure: Compare) -> None:
    compare(*measure(baseline))


def test_a_server_that_speculates(switched: Server, measure: Compare) -> None:
    """Its chunks hold several tokens."""
    cell, theirs = measure(switched)
    compare(cell, theirs)
    assert cell.accept_length is not None
    assert cell.accept_length > 1.2
    assert cell.plain_steps == 0


def compare(cell: Measured, theirs: dict[str, Any]) -> None:
    assert cell.error is None
    assert cell.output_tokens == theirs["total_output_tokens"] == REQUESTS * TOKENS
    duration_s = theirs["duration"] - theirs["asking_s"]
    assert cell.duration_s == pytest.approx(duration_s, rel=WITHIN)
    assert cell.output_tok_s == pytest.approx(theirs["output_throughput"] * theirs["duration"] / duration_s, rel=WITHIN)
    assert cell.requests_per_s == pytest.approx(REQUESTS / duration_s, rel=WITHIN)
    # The same numbers of the same requests.
    assert cell.ttft_ms_p50 == pytest.approx(theirs["median_ttft_ms"])
    assert cell.e2e_ms_p50 == pytest.approx(theirs["median_e2e_latency_ms"])
    assert cell.e2e_ms_p99 == pytest.approx(theirs["p99_e2e_latency_ms"])
    # `itls` holds an entry per token after the first chunk: their sum is last token minus first token.
    assert cell.tpot_ms_p50 == pytest.approx(1000 * median(sum(itl) / len(itl) for itl in theirs["itls"]))
    spread_as_theirs = [sum(itl) / (TOKENS - 1) for itl in theirs["itls"]]
    assert 1000 * median(spread_as_theirs) == pytest.approx(theirs["median_tpot_ms"], rel=WITHIN)
