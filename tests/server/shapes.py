"""The servers that the tests know, of the SGLang release in whose environment they run."""

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from specdec.profile import load_profile, plan_server
from specdec.server import ServerPlan

RELEASE = version("sglang")
PROFILE = load_profile("cpu-tiny")
INJECTED = str(Path(__file__).parent / "injected")
WORKER = {"v1": "EAGLEWorker", "v2": "EAGLEWorkerV2"}

# name: (worker of the profile, num_steps, topk, num_draft_tokens)
SHAPES = {
    "0.5.12": {
        "v1-tree": ("v1", 3, 4, 16),
        "v1-chain": ("v1", 3, 1, 4),
        "v2-chain": ("v2", 3, 1, 4),
    },
    "0.5.23": {
        "v2-tree": ("v2", 3, 4, 16),
        "v2-chain": ("v2", 3, 1, 4),
    },
}[RELEASE]
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
    worker, steps, topk, draft_tokens = SHAPES[shape]
    made = plan_server(PROFILE, "dynamic", worker, RELEASE)
    drafts = {"steps": steps, "topk": topk, "tokens": draft_tokens}
    names = {"steps": "num-steps", "topk": "eagle-topk", "tokens": "num-draft-tokens"}
    drafting = [word for key, name in names.items() for word in (f"--speculative-{name}", str(drafts[key]))]
    return replace(made, command=[*made.command, *drafting, *TESTED_FLAGS, *flags], env=made.env | env)
