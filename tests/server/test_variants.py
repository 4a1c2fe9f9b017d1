"""Other server shapes, one server each: tensor parallel, pages of several tokens, another draft tree."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from client import Request, generate, prompt, tokens
from shapes import RELEASE, SHAPES, on_one_shape_per_class, plan
from test_recovery import rows
from test_tokens import check_tokens, delta

from specdec.servers.server import Server, ServerPlan

pytestmark = pytest.mark.sglang
CROSSING = [Request(prompt(i), 16 + 8 * i) for i in range(7)]


def check_crossing(baseline: Server, server: Server) -> None:
    """A load that crosses threshold 3 both ways, tokens equal to the baseline's."""
    server.set_threshold(3)
    before, after = check_tokens(baseline, server, CROSSING)
    assert delta(before, after, "plain_steps") > 0
    before, after = check_tokens(baseline, server, CROSSING[:2])
    assert delta(before, after, "plain_steps") == 0
    assert delta(before, after, "speculative_steps") > 0


@pytest.fixture
def two_ranks(shape: str, start: Callable[[ServerPlan], Server]) -> Server:
    """Tensor parallel, with threshold 3 from the command line."""
    flags = ["--tp-size", "2", "--speculative-disable-batch-threshold", "3"]
    return start(plan(shape, *flags, SGLANG_CPU_OMP_THREADS_BIND="0|1"))


@on_one_shape_per_class
def test_a_live_threshold_on_one_rank_does_what_the_flag_does_on_two(switched: Server, two_ranks: Server) -> None:
    """Same tokens, switches and step counts; the last two exactly where arrival times cannot matter."""
    switched.set_threshold(3)
    seen = []
    for server in (switched, two_ranks):
        server.flush_cache()
        start = state(server)
        assert start["threshold"] == 3
        answers = [tokens(generate(server.url, [request]))[0] for request in CROSSING[:2]]
        alone = state(server)
        answers += tokens(generate(server.url, CROSSING))
        crossed = state(server)
        counts = [delta(start, alone, key) for key in ("speculative_steps", "plain_steps")]
        seen.append((answers, counts, [delta(alone, crossed, key) for key in ("switches_off", "switches_on")]))
    assert seen[0] == seen[1]
    assert seen[0][1][1] == 0
    assert seen[0][2] == [1, 1]


@on_one_shape_per_class
def test_tensor_parallel_ranks_stay_together(baseline: Server, two_ranks: Server) -> None:
    """Two ranks decide from the same batch size; a live change reaches both before the same step."""
    check_crossing(baseline, two_ranks)
    two_ranks.set_threshold(0)
    before, after = check_tokens(baseline, two_ranks, CROSSING[:3])
    assert delta(before, after, "speculative_steps") == 0
    log = two_ranks.log_path.read_text()
    assert log.count("specdec: switch active") == 1, "rank 0 alone speaks"


def state(server: Server) -> dict[str, Any]:
    found = server.state()
    assert found is not None
    return found


@pytest.mark.skipif(RELEASE != "0.5.12", reason="specdec's CPU pieces for 0.5.23 know pages of one token")
@pytest.mark.parametrize("shape", [name for name in SHAPES if name.endswith("chain")])
def test_pages_of_several_tokens(shape: str, baseline: Server, start: Callable[[ServerPlan], Server]) -> None:
    check_crossing(baseline, start(plan(shape, "--page-size", "4")))


@pytest.fixture
def another_tree(start: Callable[[ServerPlan], Server], log_dir: Path) -> Server:
    """Two branches over two steps with six draft tokens, all candidates of the tree; with SGLang's warm-up."""
    shape = next(name for name in SHAPES if name.endswith("tree"))
    drafts = ["--speculative-num-steps", "2", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6"]
    wanted = plan(shape, *drafts, SPECDEC_TRACE=str(log_dir / "steps-another-tree"))
    return start(replace(wanted, command=[word for word in wanted.command if word != "--skip-server-warmup"]))


def test_another_tree(baseline: Server, another_tree: Server) -> None:
    check_crossing(baseline, another_tree)


def test_both_kinds_of_step_run_before_the_server_is_ready(another_tree: Server, log_dir: Path) -> None:
    """Case 7: SGLang's own warm-up request takes a plain and a speculative step, also without a threshold."""
    generate(another_tree.url, [Request(prompt(0), 4)])  # the trace's first lines are surely written
    modes = [row["mode"] for row in rows(log_dir / "steps-another-tree")]
    assert modes[:3] == ["plain", "speculative", "speculative"]
