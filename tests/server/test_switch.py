"""The switch as a user meets it: start line, state, live changes, metrics, soak, sampling."""

import functools
import json
import math
import re
import urllib.error
import urllib.request
from collections import Counter
from typing import Any

import psutil
import pytest
from client import Request, generate, prompt
from scipy.stats import chisquare
from shapes import RELEASE, SHAPES, WORKER_CLASS, on_one_shape_per_class

from specdec.servers.server import Server

pytestmark = pytest.mark.sglang


def state(server: Server) -> dict[str, Any]:
    found = server.state()
    assert found is not None, "the plugin is not loaded"
    return found


def test_who_runs_is_said_at_start_and_in_the_state(shape: str, switched: Server) -> None:
    """Cases 1 and 11: worker class, file, overlap and the value in force, found in the running process."""
    now = state(switched)
    assert now["active"] is True
    assert (now["plugin_version"], now["sglang_version"]) == ("0.1.0", RELEASE)
    assert now["worker_class"] == WORKER_CLASS[SHAPES[shape].worker]
    assert re.fullmatch(r"sglang/srt/speculative/eagle_worker(_v2)?\.py", now["worker_file"])
    log = switched.log_path.read_text()
    lines = [line for line in log.splitlines() if "specdec: switch active" in line]
    assert len(lines) == 1, "one line, from rank 0"
    for said in (now["worker_class"], now["worker_file"], RELEASE, "overlap " + ("on" if now["overlap"] else "off")):
        assert said in lines[0]
    assert "at most 32 running requests" in lines[0], "case 8: speculation caps them in silence"


def test_a_plugin_without_the_flag_is_inactive(baseline: Server) -> None:
    now = state(baseline)
    assert now["active"] is False
    assert "--speculative-disable-batch-threshold" in now["inactive_reason"]
    assert now["threshold"] is now["mode"] is now["accept_length"] is None
    before = now["steps_by_batch_size"].get("1", 0)
    generate(baseline.url, [Request(prompt(0), 10)])
    # The first token comes from the prefill; overlap may run one decode step beyond the end.
    assert state(baseline)["steps_by_batch_size"]["1"] - before in (9, 10)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"threshold": -1}, "must be an integer of 0 or more"),
        ({"threshold": 2.5}, "must be an integer"),
        ({"threshold": 4, "resume_threshold": 6}, "is above the threshold"),
        ({"treshold": 4}, "cannot set treshold"),
        ([4], "expected an object"),
    ],
)
def test_a_bad_live_change_changes_nothing(switched: Server, bad: Any, reason: str) -> None:
    switched.set_threshold(5, resume_threshold=3, dwell_steps=2)
    body = json.dumps({"server_args": {"specdec": bad}}).encode()
    request = urllib.request.Request(f"{switched.url}/set_internal_state", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as response:
            status, answer = response.status, json.load(response)
        said = state(switched)["refused_change"]
    except urllib.error.HTTPError as error:  # SGLang 0.5.23 lets numbers alone through to the scheduler
        status, answer, said = error.code, [False], error.read().decode()
    assert (status, answer) in [(200, [False]), (400, [False])]
    assert reason in said
    now = state(switched)
    assert (now["threshold"], now["resume_threshold"], now["dwell_steps"]) == (5, 3, 2)


def test_metrics_agree_with_the_state(switched: Server) -> None:
    switched.set_threshold(2)
    generate(switched.url, [Request(prompt(i), 20 + 10 * i) for i in range(4)])
    now = state(switched)
    with urllib.request.urlopen(f"{switched.url}/metrics") as response:
        text = response.read().decode()
    found = {
        (name, re.sub(r".*(mode|to)=\"(\w+)\".*", r"\2", labels) if "mode=" in labels or "to=" in labels else ""): value
        for name, labels, value in re.findall(r"^(specdec_\w+)\{(.*?)\} ([\d.e+-]+)$", text, re.MULTILINE)
    }
    expected = {
        ("specdec_decode_steps_total", "speculative"): now["speculative_steps"],
        ("specdec_decode_steps_total", "plain"): now["plain_steps"],
        ("specdec_speculative_tokens_total", ""): now["speculative_tokens"],
        ("specdec_threshold", ""): 2,
    }
    for key, value in expected.items():
        # Overlap: the result of a step run after a request's end can still be on its way.
        assert float(found[key]) == pytest.approx(value, abs=2), key


@on_one_shape_per_class
def test_soak(switched: Server) -> None:
    """Hundreds of short requests, the batch growing and shrinking across the threshold; then SGLang's own idle check
    (it ends the server if KV slots have leaked) must pass and memory must not have grown."""
    switched.set_threshold(4, resume_threshold=2, dwell_steps=3)
    switched.flush_cache()

    def burst(first: int) -> None:
        for wave, concurrency in enumerate((2, 9, 16, 5)):
            requests = [Request(prompt(first + 40 * wave + i, 6 + i % 20), 1 + i % 9) for i in range(40)]
            generate(switched.url, requests, concurrency=concurrency)

    burst(0)
    before_mb = resident_mb(switched)
    before = state(switched)
    burst(1000)
    burst(2000)
    after = state(switched)
    assert after["switches_off"] > before["switches_off"] + 5
    assert after["switches_on"] > before["switches_on"] + 5
    assert resident_mb(switched) < before_mb * 1.1 + 20
    switched.flush_cache()
    answers = generate(switched.url, [Request(prompt(1), 8)])
    assert answers[0] is not None
    assert switched.running()
    assert "leak" not in switched.log_path.read_text()


def resident_mb(server: Server) -> float:
    return sum(process.memory_info().rss for process in psutil.Process(server.pid).children(recursive=True)) / 1e6


@pytest.mark.parametrize("threshold", [None, 0])
def test_sampling_follows_the_target(baseline: Server, switched: Server, threshold: int | None) -> None:
    """Temperature 1: the second token, the first to come from verification, is distributed as the target says."""
    switched.set_threshold(threshold)
    ids, first = telling_prompt(baseline)
    sampled = Request(ids, 3, sampling={"temperature": 1.0})
    answers = generate(switched.url, [sampled] * 500, concurrency=32)
    seconds = [answer["output_ids"][1] for answer in answers if answer and answer["output_ids"][0] == first]
    assert len(seconds) > 250
    exact = next_token_probabilities(baseline, [*ids, first])
    p_value, bins = goodness_of_fit(exact, Counter(seconds), len(seconds))
    assert bins >= 4
    assert p_value > 1e-5


@functools.cache
def telling_prompt(baseline: Server) -> tuple[list[int], int]:
    """A prompt whose first token is nearly certain (so that many draws share it) and whose second is not."""
    for number in range(64):
        ids = prompt(number)
        probability, first = max((p, token) for token, p in next_token_probabilities(baseline, ids).items())
        if probability > 0.7:
            second = sorted(next_token_probabilities(baseline, [*ids, first]).values())
            if second[-1] < 0.6 and second[-4] > 0.03:
                return ids, first
    raise AssertionError("no held-out prompt is fit for this test")


def next_token_probabilities(server: Server, ids: list[int]) -> dict[int, float]:
    """The target's exact distribution of the token after ids."""
    body = {"return_logprob": True, "top_logprobs_num": 256}
    answer = generate(server.url, [Request(ids, 1, sampling={"temperature": 1.0}, body=body)])[0]
    assert answer is not None
    return {token: math.exp(value) for value, token, _ in answer["meta_info"]["output_top_logprobs"][0]}


def goodness_of_fit(exact: dict[int, float], seen: Counter[int], count: int) -> tuple[float, int]:
    """Chi-square p-value over the tokens expected at least 5 times, all others pooled; and the number of bins."""
    common = [token for token, probability in exact.items() if probability * count >= 5]
    expected = [exact[token] * count for token in common]
    observed = [float(seen[token]) for token in common]
    expected.append(count - sum(expected))
    observed.append(count - sum(observed))
    return float(chisquare(observed, expected).pvalue), len(observed)
