"""Does the switch work on this machine? One verdict per line, from real servers; made for the first run on a GPU.

Per worker: greedy tokens with every kind of step against the baseline's, graphs in use in both modes, what "off"
costs against a baseline server and "on" against static EAGLE-3 without the switch, side by side in alternation.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from specdec.load.cell import run_cell
from specdec.load.prompts import Prompt, read_prompts
from specdec.servers.profile import Profile, locate, plan_server
from specdec.servers.server import Server, ServerPlan
from specdec.worker_path.server_flags import THRESHOLD_FLAG

CONCURRENCIES = (1, 8, 32)
ROUNDS = 3
PARITY_TOKENS = 64
# What "off" may cost against a baseline, and "on" against static EAGLE-3. On two CPU cores the verify of one node and
# the draft extend are dear beside a tiny model (README, What "off" costs).
OFF_TAX = {"cuda": 0.05, "cpu": 0.25}
ON_TAX = {"cuda": 0.02, "cpu": 0.1}


@dataclass(frozen=True)
class Verdict:
    """One line of the check."""

    ok: bool
    text: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.ok else 'FAIL'} {self.text}"


def self_check(
    profile: Profile, sglang: str, say: Callable[[str], None] = print, rounds: int = ROUNDS
) -> list[Verdict]:
    """Check every worker of the profile; says each verdict as it is reached and returns all.

    Needs room for three servers side by side (baseline, switched, stock static). Raises ServerDied, CellError.
    """
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as logs, ExitStack() as servers:

        def start(plan: ServerPlan) -> Server:
            return servers.enter_context(Server.start(plan, logs, profile.start_timeout_s))

        prompts = read_prompts(locate(profile.prompts)).prompts
        baseline = start(plan_server(profile, "baseline", "none", sglang))
        for worker in profile.release(sglang).workers:
            switched = start(plan_server(profile, "dynamic", worker, sglang))
            static = start(stock(plan_server(profile, "dynamic", worker, sglang)))
            for verdict in check_worker(worker, baseline, switched, static, prompts, rounds, profile.device):
                say(str(verdict))
                verdicts.append(verdict)
            switched.stop()
            static.stop()
    return verdicts


def stock(plan: ServerPlan) -> ServerPlan:
    """The same server without the switch: SGLang's own static EAGLE-3."""
    at = plan.command.index(THRESHOLD_FLAG)
    return replace(plan, arm="static", command=plan.command[:at] + plan.command[at + 2 :])


def check_worker(
    worker: str,
    baseline: Server,
    switched: Server,
    static: Server,
    prompts: Sequence[Prompt],
    rounds: int,
    device: str,
) -> Iterator[Verdict]:
    """The verdicts on one worker."""
    state = switched.state() or {}
    yield Verdict(bool(state.get("active")), f"{worker}: switch active in {state.get('worker_class')}")
    expected = greedy(baseline, prompts)
    # bfloat16 on a GPU rounds by batch shape: there the measure is what SGLang's own static EAGLE-3 reaches.
    needed = len(expected) if device == "cpu" else count_equal(greedy(static, prompts), expected) - 1
    for name, threshold in (("on", None), ("off", 0), ("switching", 4)):
        switched.set_threshold(threshold)
        equal = count_equal(greedy(switched, prompts), expected)
        yield Verdict(equal >= needed, f"{worker}: {name}: tokens of {equal}/{len(expected)} requests equal")
    yield graphs_in_use(worker, switched, device == "cuda")
    for name, threshold, other, tax in (("off", 0, baseline, OFF_TAX[device]), ("on", None, static, ON_TAX[device])):
        switched.set_threshold(threshold)
        for concurrency in CONCURRENCIES if name == "off" else CONCURRENCIES[:1]:
            ratio = paired_ratio(switched, other, prompts, concurrency, rounds)
            against = f"{other.plan.arm} at concurrency {concurrency}"
            yield Verdict(ratio >= 1 - tax, f"{worker}: {name} gives {ratio:.3f} of the tok/s of {against}")


def graphs_in_use(worker: str, switched: Server, on_gpu: bool) -> Verdict:
    """Whether both kinds of step have run in a CUDA graph (on a CPU there is none)."""
    state = switched.state() or {}
    share = {mode: state["graph_steps"][mode] / max(1, state[f"{mode}_steps"]) for mode in ("speculative", "plain")}
    text = ", ".join(f"{value:.0%} of {mode} steps" for mode, value in share.items())
    ok = all(value > 0.99 for value in share.values()) if on_gpu else not any(share.values())
    return Verdict(ok, f"{worker}: CUDA graphs ran {text}")


def count_equal(answers: list[list[int]], expected: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(answers, expected, strict=True))


def greedy(server: Server, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Greedy tokens of 16 requests in flight together."""
    chosen = prompts[:16]
    field = "text" if isinstance(chosen[0], str) else "input_ids"
    sampling = {"temperature": 0, "max_new_tokens": PARITY_TOKENS, "ignore_eos": True}
    answers = server.post("/generate", {field: list(chosen), "sampling_params": sampling})
    return [answer["output_ids"] for answer in answers]


def paired_ratio(a: Server, b: Server, prompts: Sequence[Prompt], concurrency: int, rounds: int) -> float:
    """Median over rounds of a's output tok/s over b's, measured one after the other, the first one alternating."""
    count = max(4, 2 * concurrency)
    chosen = [prompts[i % len(prompts)] for i in range(count)]
    ratios = []
    for turn in range(rounds):
        order = (a, b) if turn % 2 == 0 else (b, a)
        tok_s = {id(server): run_cell(server, chosen, concurrency, 64).output_tok_s for server in order}
        ratios.append(tok_s[id(a)] / tok_s[id(b)])
    return statistics.median(ratios)
