"""Our cells beside `python -m sglang.bench_serving` as a user runs it: python tests/benchmarks/against_bench_serving.py

In turn on one server that speculates, with the same prompts; prints output tok/s of both and the ratio of each pair.
Nothing is asserted: the two of a pair are different runs (tests/server/test_bench_serving.py compares the same one).
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from specdec.analysis.stats import ratio_interval
from specdec.load.bench import BENCH_MODULES
from specdec.load.cell import run_cell
from specdec.load.closed_loop import warm_up
from specdec.load.prompts import Prompt, read_prompts
from specdec.servers.profile import ROOT, load_profile, locate, plan_server
from specdec.servers.server import Server

PAIRS, CONCURRENCY, REQUESTS, TOKENS = 6, 4, 24, 64


def bench_serving(url: str, prompts: Path, result: Path) -> float:
    """Output tok/s that it reports."""
    module = next(name for name in BENCH_MODULES if importlib.util.find_spec(name))
    command = [sys.executable, "-m", module, "--backend", "sglang", "--base-url", url, "--disable-tqdm"]
    command += ["--dataset-name", "custom", "--dataset-path", str(prompts), "--sharegpt-output-len", str(TOKENS)]
    command += ["--num-prompts", str(REQUESTS), "--max-concurrency", str(CONCURRENCY), "--output-file", str(result)]
    command.append("--flush-cache")  # as our cells do: a cached prompt needs no prefill
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    return float(json.loads(result.read_text().splitlines()[-1])["output_throughput"])


def our_cell(server: Server, prompts: list[Prompt]) -> float:
    return run_cell(server, prompts, CONCURRENCY, TOKENS).output_tok_s


def main() -> None:
    profile, release = load_profile("cpu-tiny"), version("sglang")
    worker = list(profile.release(release).workers)[-1]
    prompts = read_prompts(locate(profile.prompts)).pick(REQUESTS, "benchmark")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "prompts.jsonl"
        turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": "-"}] for text in prompts]
        file.write_text("".join(json.dumps({"conversations": turn}) + "\n" for turn in turns))
        with Server.start(plan_server(profile, "static", worker, release), folder, profile.start_timeout_s) as server:
            warm_up(server, [1, CONCURRENCY], prompts)
            ratios = []
            print(
                f"SGLang {release}, worker {worker}, concurrency {CONCURRENCY}: output tok/s, ours and bench_serving's"
            )
            for pair in range(PAIRS):
                ours = our_cell(server, prompts) if pair % 2 else 0.0
                theirs = bench_serving(server.url, file, folder / "result.jsonl")
                ours = ours or our_cell(server, prompts)
                ratios.append(ours / theirs)
                print(f"{ours:8.1f} {theirs:8.1f}   ratio {ratios[-1]:.3f}", flush=True)
    interval = ratio_interval(ratios)
    print(f"ratio {interval.estimate:.3f}, 95 % interval {interval.low:.3f} to {interval.high:.3f}")


if __name__ == "__main__":
    main()
