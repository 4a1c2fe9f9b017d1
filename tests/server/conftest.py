"""Real servers for the tests, each configuration started once and shared."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shapes import INJECTED, SHAPES, plan

from specdec.server import Server, ServerPlan

MOST_SERVERS = 5  # alive at once; each takes about 2 GB


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
