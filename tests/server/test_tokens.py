"""Right to the token: greedy float32 tokens equal the baseline's, whatever the switch does."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from client import Request, baseline_answers, generate, prompt, tokens
from shapes import RANDOM, on_all_shapes

from specdec.servers.server import Server

pytestmark = pytest.mark.sglang


def delta(before: dict[str, Any], after: dict[str, Any], key: str) -> int:
    return int(after[key]) - int(before[key])


def check_tokens(baseline: Server, server: Server, requests: list[Request], **how: Any) -> tuple[dict, dict]:
    """Every answer equals the baseline's; returns the switch's state before and after."""
    expected = tokens(baseline_answers(baseline.url, [r for r in requests if r.abort_after_s is None]))
    before = server.state()
    answers = tokens(generate(server.url, requests, **how))
    after = server.state()
    assert before is not None
    assert after is not None
    assert [a for a, r in zip(answers, requests, strict=True) if r.abort_after_s is None] == expected
    return before, after


def mixed_answers(server: Server, requests: list[Request]) -> list[dict[str, Any]]:
    """Answers whose every decode step was plain or speculative at random."""
    server.set_threshold(RANDOM)
    before, answers, after = server.state(), generate(server.url, requests), server.state()
    assert before is not None
    assert after is not None
    check_mixed(before, after)
    return [answer for answer in answers if answer is not None]


def check_mixed(before: dict[str, Any], after: dict[str, Any], least: int = 1) -> None:
    assert min(delta(before, after, "plain_steps"), delta(before, after, "speculative_steps")) >= least


def staggered(count: int, seed: int, longest: int = 70) -> list[Request]:
    """Requests of different lengths that come one after the other, so that the batch grows and shrinks."""
    draw = random.Random(seed)
    return [
        Request(prompt(i, draw.randrange(4, 60)), draw.randrange(4, longest), delay_s=i * draw.uniform(0.0, 0.06))
        for i in range(count)
    ]


@pytest.mark.parametrize("threshold", [None, 0])
def test_always_on_and_always_off(baseline: Server, switched: Server, threshold: int | None) -> None:
    switched.set_threshold(threshold)
    before, after = check_tokens(baseline, switched, [Request(prompt(i)) for i in range(12)], concurrency=6)
    ran, idle = ("plain_steps", "speculative_steps") if threshold == 0 else ("speculative_steps", "plain_steps")
    assert delta(before, after, ran) > 0
    assert delta(before, after, idle) == 0


@pytest.mark.parametrize(("batch_size", "speculates"), [(3, True), (4, False)])
def test_at_the_threshold_and_beside_it(baseline: Server, switched: Server, batch_size: int, speculates: bool) -> None:
    """Case 5: which count decides is the decode batch, prefills not counted: up to N speculates, N+1 does not."""
    switched.set_threshold(3)
    requests = [Request(prompt(i), max_new_tokens=40 + 20 * i) for i in range(batch_size)]
    before, after = check_tokens(baseline, switched, requests)
    reached = delta(before["steps_by_batch_size"] | {str(batch_size): 0}, after["steps_by_batch_size"], str(batch_size))
    assert reached > 0, "the batch never had the size that this test is about"
    assert (delta(before, after, "plain_steps") == 0) == speculates
    if not speculates:
        assert delta(before, after, "speculative_steps") > 0, "smaller batches after it must speculate"


@on_all_shapes
def test_load_crosses_the_threshold_many_times(baseline: Server, switched: Server) -> None:
    """Cases 4 and 9: no stale draft leaks at a switch, and after the overload it speculates again."""
    switched.set_threshold(3)
    for wave in range(3):  # within a wave the batch grows to 6 and shrinks to 1
        requests = [Request(prompt(6 * wave + i), 16 + 8 * i) for i in range(6)]
        before, after = check_tokens(baseline, switched, requests)
        assert delta(before, after, "switches_off") >= 1
        assert delta(before, after, "switches_on") >= (wave > 0)
    before, after = check_tokens(baseline, switched, [Request(prompt(40), 32)])
    assert delta(before, after, "plain_steps") == 0


def test_requests_join_finish_and_abort(baseline: Server, switched: Server) -> None:
    switched.set_threshold(3, resume_threshold=1)
    aborted = [Request(prompt(50 + i), 400, delay_s=0.2 * i, abort_after_s=0.5 + 0.1 * i) for i in range(8)]
    before, _ = check_tokens(baseline, switched, staggered(20, seed=3) + aborted)
    switched.flush_cache()  # waits until the server is idle: SGLang looks for closed connections every few seconds
    _, after = check_tokens(baseline, switched, [Request(prompt(41), 16)])
    assert delta(before, after, "switches_off") >= 1
    assert delta(before, after, "switches_on") >= 1


@on_all_shapes
@pytest.mark.parametrize("threshold", [4, RANDOM])
def test_retraction_under_memory_pressure(baseline: Server, switched: Server, threshold: int) -> None:
    """More tokens than the KV pool holds: requests are retracted and prefilled again, while off and while mixed."""
    switched.set_threshold(threshold)
    switched.flush_cache()
    retracted = switched.log_path.read_text().count("Retract requests")
    # Of requests that ignore the end of a text SGLang 0.5.23 knows the length, and admits none that may not fit.
    requests = [Request(prompt(i, 60), 120, sampling={"ignore_eos": False}) for i in range(24)]
    check_mixed(*check_tokens(baseline, switched, requests))
    assert switched.log_path.read_text().count("Retract requests") > retracted, "nothing was retracted"


def test_shared_prefixes_and_radix_cache(baseline: Server, switched: Server) -> None:
    """Prefixes of one document, short and long (chunked at 64 tokens), hit the radix cache in both modes."""
    switched.set_threshold(3)
    document = prompt(60, 300)
    requests = [Request(document[: 40 + 37 * (i % 7)] + prompt(i, 5), 30, delay_s=0.15 * i) for i in range(16)]
    check_tokens(baseline, switched, requests)
    answers = generate(switched.url, requests[:4])
    assert all(answer and answer["meta_info"]["cached_tokens"] > 0 for answer in answers)


def test_chunked_prefill_among_decodes(baseline: Server, switched: Server) -> None:
    """Case 5: long prompts are prefilled in chunks between the decode steps of others."""
    switched.set_threshold(3)
    long = [Request(prompt(70 + i, 250 + 70 * i), 20, delay_s=0.3 + 0.4 * i) for i in range(4)]
    before, after = check_tokens(baseline, switched, [Request(prompt(i), 90) for i in range(3)] + long)
    assert delta(before, after, "switches_off") >= 1


def test_stop_strings_and_token_ids(baseline: Server, switched: Server) -> None:
    requests = []
    for i, answer in enumerate(baseline_answers(baseline.url, [Request(prompt(i), 60) for i in range(6)])):
        ids = answer["output_ids"]
        requests.append(Request(prompt(i), 60, sampling={"stop_token_ids": [ids[17]]}))
        word = answer["text"].split()[6]
        requests.append(Request(prompt(i), 60, sampling={"stop": [word]}))
    for got, want in zip(mixed_answers(switched, requests), baseline_answers(baseline.url, requests), strict=True):
        assert got["text"] == want["text"]
        assert got["meta_info"]["finish_reason"] == want["meta_info"]["finish_reason"]


def test_logprobs(baseline: Server, switched: Server) -> None:
    requests = [Request(prompt(i), 24, body={"return_logprob": True, "top_logprobs_num": 2}) for i in range(5)]
    for got, want in zip(mixed_answers(switched, requests), baseline_answers(baseline.url, requests), strict=True):
        ours, theirs = got["meta_info"]["output_token_logprobs"], want["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in ours] == [token for _, token, _ in theirs] == want["output_ids"]
        assert [value for value, _, _ in ours] == pytest.approx([value for value, _, _ in theirs], abs=1e-3)


def test_penalties_are_the_baselines_while_off(
    baseline: Server, baseline_with_overlap: Callable[[], Server], switched: Server
) -> None:
    """Speculative steps of SGLang penalise with delay (the tokens of one verify do not see each other), so that its
    static EAGLE differs from the baseline; plain steps have nothing to delay but what overlap delays anyway."""
    switched.set_threshold(0)
    state = switched.state()
    assert state is not None
    penalties = {"frequency_penalty": 0.7, "presence_penalty": 0.3}
    requests = [Request(prompt(i), 40, sampling=penalties) for i in range(5)]
    reference = baseline_with_overlap() if state["overlap"] else baseline
    assert tokens(generate(switched.url, requests)) == tokens(generate(reference.url, requests))


def test_structured_output(baseline: Server, switched: Server) -> None:
    grammar = {"regex": r"(module|class|function) [a-z]{3,12}( and [a-z]{3,12}){0,3}\."}
    requests = [Request(prompt(i), 60, sampling=grammar | {"ignore_eos": False}) for i in range(6)]
    assert tokens(mixed_answers(switched, requests)) == tokens(baseline_answers(baseline.url, requests))


@on_all_shapes
def test_every_step_mixed_at_random(baseline: Server, switched: Server) -> None:
    """Each decode step's mode is drawn from a seed, while requests come, end and are aborted."""
    switched.set_threshold(RANDOM)
    aborted = [Request(prompt(80 + i), 400, delay_s=0.5 * i, abort_after_s=0.6) for i in range(4)]
    before, after = check_tokens(baseline, switched, staggered(30, seed=5, longest=150) + aborted)
    check_mixed(before, after, least=15)
    assert delta(before, after, "switches_off") > 5
