"""Real servers for the tests, each configuration started once and shared.

The tests run in the environment of one SGLang release and take that release's configurations.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from specdec.profile import load_profile, plan_server
from specdec.server import Server, ServerPlan

RELEASE = version("sglang")
PROFILE = load_profile("cpu-tiny")
INJECTED = str(Path(__file__).parent / "injected")
MOST_SERVERS = 5  # alive at once; each takes about 2 GB
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


@pytest.fixture(scope="session")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server-logs")


@pytest.fixture(scope="session")
def start(log_dir: Path) -> Iterator[Callable[[ServerPlan], Server]]:
    """Start a server, or give the running one of the same plan; those not used for longest end, all end at last."""
    running: dict[str, Server] = {}

    def started(wanted: ServerPlan) -> Server:
        key = repr((wanted.command, sorted(wanted.env.items())))
        server = running.pop(key, None)
        if server is None or not server.running():
            while len(running) >= MOST_SERVERS:
                running.pop(next(iter(running))).stop()
            server = Server.start(wanted, log_dir, timeout_s=300)
        running[key] = server  # the last one used is the last in order
        return server

    try:
        yield started
    finally:
        for server in running.values():
            server.stop()


@pytest.fixture
def baseline(start: Callable[[ServerPlan], Server]) -> Server:
    """Without speculation: what it answers is right."""
    return start(plan(None))


@pytest.fixture
def baseline_without_overlap(start: Callable[[ServerPlan], Server]) -> Server:
    """For penalties: with overlap SGLang applies a token's penalty one step late, also without speculation."""
    return start(plan(None, "--disable-overlap-schedule"))


@pytest.fixture(scope="session", params=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def step_trace(shape: str, log_dir: Path) -> Path:
    """Where the switched server writes its step trace."""
    return log_dir / f"steps-{shape}"


@pytest.fixture
def switched(shape: str, step_trace: Path, start: Callable[[ServerPlan], Server]) -> Server:
    """A server with the switch, speculating always until a test sets a threshold."""
    server = start(plan(shape, SPECDEC_TRACE=str(step_trace)))
    server.set_threshold(None, dwell_steps=1)
    return server


@pytest.fixture
def draft_trace(shape: str, log_dir: Path) -> Path:
    """Where the injected server writes its draft's state."""
    return log_dir / f"draft-state-{shape}"


@pytest.fixture
def injected(shape: str, draft_trace: Path, start: Callable[[ServerPlan], Server]) -> Server:
    """A server with the plugin of tests/server/injected: while a threshold is set, modes are random by seed."""
    env = {"PYTHONPATH": INJECTED, "SPECDEC_TEST_RANDOM_SEED": "11", "SPECDEC_TEST_DRAFT_TRACE": str(draft_trace)}
    server = start(plan(shape, **env))
    server.set_threshold(None)
    return server
