"""Real servers for the tests, each configuration started once and shared."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shapes import ALL_SHAPES, INJECTED, SHAPES, plan

from specdec.servers.server import Server, ServerPlan

MOST_SERVERS = 3  # alive at once, each takes about 2 GB: the baseline, a shape's, and one more


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Here, one shape after the other, then what has none: no server is started twice."""
    order = [*ALL_SHAPES, None]
    places = [place for place, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    here = sorted((items[place] for place in places), key=lambda item: order.index(shape_of(item)))
    for place, item in zip(places, here, strict=True):
        items[place] = item


def shape_of(item: Any) -> str | None:
    return item.callspec.params.get("shape") if hasattr(item, "callspec") else None


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
            server = Server.start(wanted, log_dir, timeout_s=600)
        running[key] = server  # the last one used is the last in order
        return server

    try:
        yield started
    finally:
        for server in running.values():
            server.stop()


@pytest.fixture
def baseline(start: Callable[[ServerPlan], Server]) -> Server:
    """Without speculation: what it answers is right. Without overlap too, with which SGLang applies a token's
    penalty one step late."""
    return start(plan(None, "--disable-overlap-schedule"))


@pytest.fixture
def baseline_with_overlap(start: Callable[[ServerPlan], Server]) -> Callable[[], Server]:
    return lambda: start(plan(None))


@pytest.fixture(params=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def step_trace(shape: str, log_dir: Path) -> Path:
    """Where the switched server writes its step trace."""
    return log_dir / f"steps-{shape}"


@pytest.fixture
def draft_trace(shape: str, log_dir: Path) -> Path:
    """Where the switched server writes its draft's state while this file exists."""
    return log_dir / f"draft-state-{shape}"


@pytest.fixture
def switched(shape: str, step_trace: Path, draft_trace: Path, start: Callable[[ServerPlan], Server]) -> Server:
    """A server with the switch, speculating always until a test sets a threshold; RANDOM mixes the modes by seed."""
    env = {"SPECDEC_TRACE": str(step_trace), "PYTHONPATH": INJECTED}
    env |= {"SPECDEC_TEST_RANDOM_SEED": "11", "SPECDEC_TEST_DRAFT_TRACE": str(draft_trace)}
    server = start(plan(shape, **env))
    server.set_threshold(None, dwell_steps=1)
    return server
