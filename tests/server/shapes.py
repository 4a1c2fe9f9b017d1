"""The servers that the tests know, of the SGLang release in whose environment they run."""

from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import pytest

from specdec.servers.profile import load_profile, plan_server
from specdec.servers.server import ServerPlan

RELEASE = version("sglang")
PROFILE = load_profile("cpu-tiny")
INJECTED = str(Path(__file__).parent / "injected")
WORKER_CLASS = {"v1": "EAGLEWorker", "v2": "EAGLEWorkerV2", "v2-tree": "EAGLEWorkerV2"}
RANDOM = 1000  # no batch is that large: at this threshold tests/server/injected draws every step's mode


@dataclass(frozen=True)
class Shape:
    """A worker of the profile and what it drafts."""

    worker: str
    num_steps: int
    topk: int
    num_draft_tokens: int
    forced_overlap: bool = False  # SGLang 0.5.23 has none for speculation on a CPU; tests/server/injected lets it


CHAIN, TREE = (3, 1, 4), (3, 4, 16)
# As a user of this machine gets them.
SHAPES = {
    "0.5.12": {"v1-tree": Shape("v1", *TREE), "v1-chain": Shape("v1", *CHAIN), "v2-chain": Shape("v2", *CHAIN)},
    "0.5.23": {"v2-tree": Shape("v2-tree", *TREE), "v2-chain": Shape("v2", *CHAIN)},
}[RELEASE]
# As on a GPU, where SGLang 0.5.23 overlaps.
OVERLAPPED = {
    f"{name}-overlap": replace(shape, forced_overlap=True) for name, shape in SHAPES.items() if RELEASE == "0.5.23"
}
ALL_SHAPES = SHAPES | OVERLAPPED
ONE_SHAPE = next(iter(SHAPES))
ONE_PER_CLASS = list({WORKER_CLASS[SHAPES[name].worker]: name for name in reversed(SHAPES)}.values())
# In place of the fixture's own choice, SHAPES:
on_all_shapes = pytest.mark.parametrize("shape", list(ALL_SHAPES))
on_one_shape = pytest.mark.parametrize("shape", [ONE_SHAPE])
on_one_shape_per_class = pytest.mark.parametrize("shape", ONE_PER_CLASS)

# Small enough that 24 requests do not fit at once, and admitted without caution: requests are retracted under load,
# as on a full GPU.
TESTED_FLAGS = [
    *("--max-total-tokens", "3000", "--schedule-conservativeness", "0.05"),
    *("--chunked-prefill-size", "64", "--grammar-backend", "llguidance"),
]


def plan(shape: str | None, *flags: str, **env: str) -> ServerPlan:
    """The profile's server (shape None: the baseline), with flags added (the last one given counts)."""
    if shape is None:
        made = plan_server(PROFILE, "baseline", "none", RELEASE)
        return replace(made, command=[*made.command, *TESTED_FLAGS, *flags], env=made.env | env)
    wanted = ALL_SHAPES[shape]
    made = plan_server(PROFILE, "dynamic", wanted.worker, RELEASE)
    drafting = [
        *("--speculative-num-steps", str(wanted.num_steps)),
        *("--speculative-eagle-topk", str(wanted.topk)),
        *("--speculative-num-draft-tokens", str(wanted.num_draft_tokens)),
    ]
    if wanted.forced_overlap:
        env = {"PYTHONPATH": INJECTED, "SPECDEC_TEST_OVERLAP": "1"} | env
    return replace(made, command=[*made.command, *drafting, *TESTED_FLAGS, *flags], env=made.env | env)
