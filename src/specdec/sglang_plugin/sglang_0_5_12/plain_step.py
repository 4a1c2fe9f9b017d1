"""What both workers of SGLang 0.5.12 share for a plain step: the one-node verify and the resources it runs with."""

import logging
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.utils import get_available_gpu_memory, log_info_on_rank0
from torch import Tensor

from specdec.sglang_plugin.swap import swapped_attributes

logger = logging.getLogger(__name__)

# A plain step drafts nothing and verifies one node a request, the bonus token.
PLAIN_STEPS, PLAIN_DRAFT_TOKENS = 0, 1


def one_node_verify(
    bonus_tokens: Tensor,
    seq_lens: Tensor,
    seq_lens_cpu: Tensor,
    seq_lens_sum: int,
    topk: int,
    capture_hidden_mode: CaptureHiddenMode | None,
) -> EagleVerifyInput:
    """A draft tree of the root alone, for every request of the batch.

    bonus_tokens, seq_lens [bs]: the last committed token and the number of tokens before it in the KV cache. The
    mask lets the node see its request's whole prefix and itself (rows of prefix + 1 columns, one per request).
    """
    bs, device = seq_lens.numel(), seq_lens.device
    none = torch.full((bs, 1), -1, dtype=torch.long, device=device)
    return EagleVerifyInput(
        draft_token=bonus_tokens.to(torch.int64),
        custom_mask=torch.ones(seq_lens_sum + bs, dtype=torch.bool, device=device),
        positions=seq_lens.to(torch.int64),
        retrieve_index=torch.arange(bs, dtype=torch.long, device=device)[:, None],
        retrieve_next_token=none,
        retrieve_next_sibling=none.clone(),
        retrieve_cum_len=None,
        spec_steps=PLAIN_STEPS,
        topk=topk,
        draft_token_num=PLAIN_DRAFT_TOKENS,
        capture_hidden_mode=capture_hidden_mode,
        seq_lens_sum=seq_lens_sum,
        seq_lens_cpu=seq_lens_cpu,
    )


@dataclass(frozen=True)
class PlainState:
    """The resources of a plain step: attention backends and CUDA graphs for one token a request.

    A backend takes the number of draft tokens a request from server_args when it is made, and a graph is captured for
    it, so those of the speculative steps do not fit. Graphs are None where SGLang would run without one.
    """

    target_attn_backend: Any
    target_graph_runner: Any
    draft_attn_backend: Any  # of the draft model's runner: the eager draft extend of v2
    draft_extend_attn_backend: Any
    draft_extend_graph_runner: Any


def build_plain_state(worker: Any, draft: Any, target_runner: Any, draft_runner: Any) -> PlainState:
    """Build (and on a GPU capture) what a plain step runs with; called once, before the server is ready.

    worker: verifies; draft: holds the draft stages (v1: the same object). Relies on _override_worker_state, with which
    SGLang's adaptive speculation builds its states: it sets the step numbers on worker and server_args and puts all
    back. SGLang's build_adaptive_runtime_state itself cannot do it: with no draft steps it makes a multi-step draft
    backend that fails on its first, missing, step (triton_backend.py, flashinfer_backend.py).
    """
    server_args = worker.server_args
    before_gb, start_s = get_available_gpu_memory(worker.device, worker.gpu_id), time.perf_counter()
    with worker._override_worker_state(PLAIN_STEPS, PLAIN_DRAFT_TOKENS):
        factory = DraftBackendFactory(server_args, draft_runner, worker.topk, PLAIN_STEPS)
        draft.draft_extend_attn_backend = factory.create_draft_extend_backend()
        draft.init_cuda_graphs()  # with no draft steps: the draft extend's graph alone
        target_attn_backend = _new_attn_backend(target_runner)
        state = PlainState(
            target_attn_backend=target_attn_backend,
            target_graph_runner=None
            if server_args.disable_cuda_graph
            else CudaGraphRunner(
                target_runner,
                attn_backend=target_attn_backend,
                speculative_num_steps=PLAIN_STEPS,
                speculative_num_draft_tokens=PLAIN_DRAFT_TOKENS,
            ),
            draft_attn_backend=_new_attn_backend(draft_runner),
            draft_extend_attn_backend=draft.draft_extend_attn_backend,
            draft_extend_graph_runner=draft.cuda_graph_runner_for_draft_extend,
        )
    used_gb = before_gb - get_available_gpu_memory(worker.device, worker.gpu_id)
    log_info_on_rank0(
        logger,
        f"specdec: built the plain step's backends and graphs (target graph "
        f"{'yes' if state.target_graph_runner else 'no'}, draft extend graph "
        f"{'yes' if state.draft_extend_graph_runner else 'no'}) in {time.perf_counter() - start_s:.1f} s, "
        f"{used_gb:.2f} GB",
    )
    return state


def _new_attn_backend(runner: Any) -> Any:
    """A second backend of the kind that the runner uses."""
    before = runner.init_new_workspace
    try:
        return runner._get_attention_backend(init_new_workspace=True)
    finally:
        runner.init_new_workspace = before


def swapped(
    worker: Any, draft: Any, target_runner: Any, draft_runner: Any, state: PlainState
) -> AbstractContextManager[None]:
    """Run with the plain step's resources, then put the speculative ones back.

    Unlike SGLang's apply_runtime_state this leaves server_args alone, from which the allocation of KV slots is sized.
    """
    changes = [
        (holder, name, value)
        for holder in (worker, draft)  # v1: one object is both
        for name, value in (
            ("speculative_num_steps", PLAIN_STEPS),
            ("speculative_num_draft_tokens", PLAIN_DRAFT_TOKENS),
        )
    ]
    changes += [
        (draft, "draft_extend_attn_backend", state.draft_extend_attn_backend),
        (draft, "cuda_graph_runner_for_draft_extend", state.draft_extend_graph_runner),
        (draft_runner, "attn_backend", state.draft_attn_backend),
        (target_runner, "attn_backend", state.target_attn_backend),
        (target_runner, "graph_runner", state.target_graph_runner),
    ]
    return swapped_attributes(changes)
