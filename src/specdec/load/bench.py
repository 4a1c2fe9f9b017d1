"""SGLang's bench_serving code in this process: a closed loop of greedy streaming requests of fixed length."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from specdec.load.loop_thread import CellError, StallWatch, run_in_thread
from specdec.load.prompts import Prompt
from specdec.servers.server import Server, ServerDied

BENCH_BACKEND = "sglang-specdec"  # our name in bench_serving's table of request functions
BENCH_MODULES = ("sglang.benchmark.serving", "sglang.bench_serving")  # 0.5.23, 0.5.12
_requests_done: ContextVar[list[Any]] = ContextVar("requests_done")


@dataclass(frozen=True)
class RequestTimes:
    """One answered request, on the client's clock."""

    start_s: float
    ttft_s: float | None  # None: no token came
    tpot_s: float | None  # None: no token came after the first chunk
    e2e_s: float
    output_tokens: int


@functools.cache
def bench_module() -> Any:
    """SGLang's bench_serving with our request function in its table. The import takes 5 to 13 s, once."""
    for name in BENCH_MODULES:
        try:
            bench = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        bench.ASYNC_REQUEST_FUNCS[BENCH_BACKEND] = functools.partial(_recorded, bench)
        # Module-global; the same for every cell, so that it never matters which run reads it.
        bench.set_global_args(_bench_args())
        bench.set_ulimit()
        return bench
    raise ModuleNotFoundError(f"neither {' nor '.join(BENCH_MODULES)} is installed")


async def _recorded(bench: Any, request_func_input: Any, pbar: Any = None) -> Any:
    """SGLang's own request function; keeps what it returns, of which `benchmark` returns only a part."""
    output = await bench.async_request_sglang_generate(request_func_input, pbar)
    _requests_done.get().append(output)
    return output


def _bench_args() -> argparse.Namespace:
    """What bench_serving reads from its command line: greedy, streaming, EOS ignored, no warm-up of its own.

    Without the warm-up request the server's token counts are the cell's alone; a server is warmed up at
    start.
    """
    return argparse.Namespace(
        backend=BENCH_BACKEND,
        dataset_name="custom",
        warmup_requests=0,
        temperature=0.0,
        top_p=1.0,
        disable_ignore_eos=False,
        disable_stream=False,
        return_logprob=False,
        return_routed_experts=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        plot_throughput=False,
        goodput=None,
        cache_report=False,
        sharegpt_output_len=None,
        random_input_len=None,
        random_output_len=None,
        random_range_ratio=None,
        output_file=os.devnull,
        output_details=False,
    )


class _NoTokenizer:
    """bench_serving counts its output's tokens again with a tokenizer; we take the server's count instead."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return []


def run_bench(
    server: Server, prompts: Sequence[Prompt], concurrency: int, output_tokens: int, stall_s: float
) -> list[RequestTimes]:
    """Run the cell's load through bench_serving's closed loop; its requests in the order of their answers."""
    bench = bench_module()
    outputs: list[Any] = []

    async def load() -> None:
        _requests_done.set(outputs)
        rows = [
            bench.DatasetRow(
                prompt=prompt if isinstance(prompt, str) else list(prompt),
                prompt_len=0 if isinstance(prompt, str) else len(prompt),  # unused: the server counts
                output_len=output_tokens,
            )
            for prompt in prompts
        ]
        await bench.benchmark(
            backend=BENCH_BACKEND,
            api_url=f"{server.url}/generate",
            base_url=server.url,
            model_id="",
            tokenizer=_NoTokenizer(),
            input_requests=rows,
            request_rate=float("inf"),
            max_concurrency=concurrency,
            disable_tqdm=True,
            lora_names=[],
            lora_request_distribution=None,
            lora_zipf_alpha=None,
            extra_request_body={},
            profile=False,
            warmup_requests=0,
        )

    watch = StallWatch(server, lambda: len(outputs), stall_s)
    try:
        with contextlib.redirect_stdout(io.StringIO()), _proxies_bypassed():
            run_in_thread(load, watch)
    except (CellError, ServerDied):
        raise
    except Exception as error:
        # After failed requests it fails too, e.g. on percentiles of nothing; a request's own error says more.
        if not any(not output.success for output in outputs):
            raise CellError(f"{type(error).__name__}: {error}") from error
    failed = [output for output in outputs if not output.success]
    if failed or len(outputs) != len(prompts):
        reason = (failed[0].error.strip().splitlines() or ["no reason given"])[-1] if failed else "no answer"
        missing = len(prompts) - len(outputs) + len(failed)
        raise CellError(f"{missing} of {len(prompts)} requests failed: {reason}")
    return [_times_of(output) for output in outputs]


def _times_of(output: Any) -> RequestTimes:
    """One request from bench_serving's record of it.

    Its `itl` spreads each gap between chunks over the tokens of the later chunk: the sum is last minus first
    token, the length the tokens after the first chunk. It is empty, and ttft 0, if no text came.
    """
    return RequestTimes(
        start_s=output.start_time,
        ttft_s=output.ttft or None,
        tpot_s=sum(output.itl) / len(output.itl) if output.itl else None,
        e2e_s=output.latency,
        output_tokens=output.output_len,
    )


@contextlib.contextmanager
def _proxies_bypassed() -> Iterator[None]:
    """bench_serving asks the server through `requests`, which would go through a proxy of the environment."""
    before = os.environ.get("NO_PROXY")
    os.environ["NO_PROXY"] = f"{before},127.0.0.1" if before else "127.0.0.1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["NO_PROXY"]
        else:
            os.environ["NO_PROXY"] = before
