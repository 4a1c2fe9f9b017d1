"""Other server shapes, one server each: tensor parallel, pages of several tokens, another draft tree."""

from collections.abc import Callable

import pytest
from client import Request, prompt
from shapes import RELEASE, SHAPES, plan
from test_tokens import check_tokens, delta

from specdec.server import Server, ServerPlan

CROSSING = [Request(prompt(i), 16 + 8 * i) for i in range(7)]


def check_crossing(baseline: Server, server: Server) -> None:
    """A load that crosses threshold 3 both ways, tokens equal to the baseline's; the server ends after it."""
    server.set_threshold(3)
    before, after = check_tokens(baseline, server, CROSSING)
    assert delta(before, after, "plain_steps") > 0
    before, after = check_tokens(baseline, server, CROSSING[:2])
    assert delta(before, after, "plain_steps") == 0
    assert delta(before, after, "speculative_steps") > 0
    server.stop()


@pytest.mark.parametrize("shape", list(SHAPES))
def test_tensor_parallel_ranks_stay_together(
    shape: str, baseline: Server, start: Callable[[ServerPlan], Server]
) -> None:
    """Two ranks decide from the same batch size; a live change reaches both before the same step."""
    wanted = plan(shape, "--tp-size", "2", SGLANG_CPU_OMP_THREADS_BIND="0|1")
    server = start(wanted)
    check_crossing(baseline, server)
    log = server.log_path.read_text()
    assert log.count("specdec: switch active") == 1, "rank 0 alone speaks"


@pytest.mark.skipif(RELEASE != "0.5.12", reason="specdec's CPU pieces for 0.5.23 know pages of one token")
@pytest.mark.parametrize("shape", [name for name in SHAPES if name.endswith("chain")])
def test_pages_of_several_tokens(shape: str, baseline: Server, start: Callable[[ServerPlan], Server]) -> None:
    check_crossing(baseline, start(plan(shape, "--page-size", "4")))


def test_another_tree(baseline: Server, start: Callable[[ServerPlan], Server]) -> None:
    """Two branches over two steps with six draft tokens, all candidates of the tree."""
    shape = next(name for name in SHAPES if name.endswith("tree"))
    drafts = ["--speculative-num-steps", "2", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6"]
    check_crossing(baseline, start(plan(shape, *drafts)))
