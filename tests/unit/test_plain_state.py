"""The plain step's resources on SGLang 0.5.12 (case 6), with fakes for what only a GPU has: graphs and memory.

The worker's own way of building states (EAGLEWorker._override_worker_state) is the real one.
"""

import os
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest

if version("sglang") != "0.5.12":
    pytest.skip("plain_step.py is for SGLang 0.5.12", allow_module_level=True)

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from sglang.srt.speculative.eagle_worker import EAGLEWorker

from specdec.sglang_plugin.sglang_0_5_12 import plain_step

pytestmark = pytest.mark.sglang


class FakeBackend:
    """Remembers the number of draft tokens that SGLang's backends read from server_args when they are made."""

    def __init__(self, server_args: Any) -> None:
        self.draft_tokens = server_args.speculative_num_draft_tokens


class FakeGraphRunner:
    """Stands in for CudaGraphRunner, which captures on a GPU."""

    def __init__(self, runner: Any, **captured: Any) -> None:
        self.captured = captured


def fake_worker(disable_cuda_graph: bool) -> Any:
    """As an EAGLEWorker after its construction: three steps, four draft tokens."""
    server_args = SimpleNamespace(
        speculative_num_steps=3, speculative_num_draft_tokens=4, disable_cuda_graph=disable_cuda_graph
    )
    speculative = FakeBackend(server_args)

    def runner() -> Any:
        made = SimpleNamespace(attn_backend=speculative, graph_runner="speculative graph", init_new_workspace=False)
        made._get_attention_backend = lambda init_new_workspace: FakeBackend(server_args)
        made.draft_attn_backend = "multi-step draft"
        return made

    worker = SimpleNamespace(
        server_args=server_args,
        speculative_num_steps=3,
        speculative_num_draft_tokens=4,
        topk=1,
        device="cuda",
        gpu_id=0,
        draft_attn_backend="multi-step draft",
        draft_extend_attn_backend=speculative,
        cuda_graph_runner="draft graph",
        cuda_graph_runner_for_draft_extend="speculative extend graph",
        draft_model_runner=runner(),
        target_runner=runner(),
    )

    def init_cuda_graphs() -> None:
        worker.cuda_graph_runner = None
        backend = worker.draft_extend_attn_backend
        worker.cuda_graph_runner_for_draft_extend = None if disable_cuda_graph else ("extend graph", backend)

    worker.init_cuda_graphs = init_cuda_graphs
    worker._override_worker_state = lambda steps, tokens: EAGLEWorker._override_worker_state(worker, steps, tokens)
    return worker


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[Any, plain_step.PlainState]:
    monkeypatch.setattr(plain_step, "CudaGraphRunner", FakeGraphRunner)
    monkeypatch.setattr(plain_step, "get_available_gpu_memory", lambda device, gpu: 10.0)
    monkeypatch.setattr(plain_step, "log_info_on_rank0", lambda logger, text: None)
    factory = SimpleNamespace
    monkeypatch.setattr(
        plain_step,
        "DraftBackendFactory",
        lambda args, *rest: factory(create_draft_extend_backend=lambda: FakeBackend(args)),
    )
    worker = fake_worker(disable_cuda_graph=getattr(request, "param", False))
    parts = (worker, worker, worker.target_runner, worker.draft_model_runner)
    return worker, plain_step.build_plain_state(*parts)


def test_it_has_backends_and_graphs_of_its_own_for_one_token(built: tuple[Any, plain_step.PlainState]) -> None:
    worker, state = built
    for backend in (state.target_attn_backend, state.draft_attn_backend, state.draft_extend_attn_backend):
        assert backend is not worker.target_runner.attn_backend
        assert backend.draft_tokens == 1
    assert state.target_graph_runner.captured == {
        "attn_backend": state.target_attn_backend,
        "speculative_num_steps": 0,
        "speculative_num_draft_tokens": 1,
    }
    assert state.draft_extend_graph_runner == ("extend graph", state.draft_extend_attn_backend)


def test_building_it_leaves_settings_and_speculative_resources_alone(
    built: tuple[Any, plain_step.PlainState],
) -> None:
    worker, _ = built
    args = worker.server_args
    assert (args.speculative_num_steps, args.speculative_num_draft_tokens) == (3, 4)
    assert (worker.speculative_num_steps, worker.speculative_num_draft_tokens) == (3, 4)
    assert worker.cuda_graph_runner == "draft graph"
    assert worker.cuda_graph_runner_for_draft_extend == "speculative extend graph"
    assert worker.draft_extend_attn_backend.draft_tokens == 4


@pytest.mark.parametrize("built", [True], indirect=True)
def test_without_cuda_graphs_it_has_none_either(built: tuple[Any, plain_step.PlainState]) -> None:
    """Case 24: the eager path; it is also the one of every server in tests/server."""
    _, state = built
    assert state.target_graph_runner is state.draft_extend_graph_runner is None


def test_a_step_runs_with_it_and_what_was_there_comes_back(built: tuple[Any, plain_step.PlainState]) -> None:
    worker, state = built
    parts = (worker, worker, worker.target_runner, worker.draft_model_runner)

    def seen() -> tuple[Any, ...]:
        target, draft = worker.target_runner, worker.draft_model_runner
        steps = (worker.speculative_num_steps, worker.speculative_num_draft_tokens)
        return (*steps, target.attn_backend, target.graph_runner, draft.attn_backend, worker.draft_extend_attn_backend)

    before = seen()
    plain = (0, 1, state.target_attn_backend, state.target_graph_runner)

    def failing_step() -> None:
        with plain_step.swapped(*parts, state):
            assert seen() == (*plain, state.draft_attn_backend, state.draft_extend_attn_backend)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        failing_step()
    assert seen() == before
