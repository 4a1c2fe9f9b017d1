"""What a server counted during a piece of work: tokens, decode steps, switches."""

from __future__ import annotations

import time
import urllib.request
from typing import Any

COUNTERS_SETTLE_S = 5.0  # the server counts a request's tokens shortly after the client has its answer
COUNTERS_POLL_S = 0.05
STATE_COLUMNS = (
    *("achieved_batch_mean", "achieved_batch_peak", "accept_length"),
    *("speculative_steps", "plain_steps", "plain_step_share", "switches_off", "switches_on"),
)
_no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def state_delta(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any]:
    """What the server did between two readings of its state, as columns of Measured; None without plugin.

    The steps of a baseline are neither speculative nor plain: only its batch sizes are told.
    """
    columns: dict[str, Any] = dict.fromkeys(STATE_COLUMNS)
    if before is None or after is None:
        return columns
    earlier = before["steps_by_batch_size"]
    steps = {int(size): count - earlier.get(size, 0) for size, count in after["steps_by_batch_size"].items()}
    steps = {size: count for size, count in steps.items() if count}
    if steps:
        total_batch = sum(size * count for size, count in steps.items())
        columns["achieved_batch_mean"] = total_batch / sum(steps.values())
        columns["achieved_batch_peak"] = max(steps)
    if not (after["active"] or after["adaptive"]):
        return columns
    for name in ("speculative_steps", "plain_steps", "switches_off", "switches_on"):
        columns[name] = after[name] - before[name]
    if total := columns["speculative_steps"] + columns["plain_steps"]:
        columns["plain_step_share"] = columns["plain_steps"] / total
    tokens = after["speculative_tokens"] - before["speculative_tokens"]
    if request_steps := after["speculative_request_steps"] - before["speculative_request_steps"]:
        columns["accept_length"] = tokens / request_steps
    return columns


def token_counts(url: str) -> tuple[int, int]:
    """(prompt tokens, generated tokens) of all requests finished since the server's start, over its ranks."""
    totals = {"sglang:prompt_tokens_total": 0.0, "sglang:generation_tokens_total": 0.0}
    with _no_proxy.open(f"{url}/metrics", timeout=30) as response:
        for line in response.read().decode().splitlines():
            name = line.split("{", 1)[0].split(" ", 1)[0]
            if name in totals:
                totals[name] += float(line.rsplit(maxsplit=1)[-1])
    prompt, generated = totals.values()
    return int(prompt), int(generated)


def settled_counts(url: str, input_before: int, output_expected: int) -> tuple[int, int]:
    """Token counts once they reach what is expected, or after COUNTERS_SETTLE_S as they are."""
    deadline = time.monotonic() + COUNTERS_SETTLE_S
    while True:
        counts = token_counts(url)
        if (counts[1] >= output_expected and counts[0] > input_before) or time.monotonic() > deadline:
            return counts
        time.sleep(COUNTERS_POLL_S)
