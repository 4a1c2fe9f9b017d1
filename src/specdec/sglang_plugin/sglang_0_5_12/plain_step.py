"""What both workers of SGLang 0.5.12 share for a plain step: the one-node verify and the resources it runs with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.adaptive_runtime_state import SpecRuntimeState
from sglang.srt.speculative.eagle_info import EagleVerifyInput

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


@contextmanager
def swapped(holders: list[Any], target_runner: Any, draft_runner: Any, state: SpecRuntimeState) -> Iterator[None]:
    """Run with the plain step's resources, then put the speculative ones back.

    holders[0] carries the step numbers of the verify, the last one the draft stage (v1: one worker is both). SGLang's
    own apply_runtime_state also rewrites server_args, from which the allocation of KV slots is sized: this does not.
    """
    draft = holders[-1]
    before = [(holder.speculative_num_steps, holder.speculative_num_draft_tokens) for holder in holders]
    stages = (
        draft.draft_attn_backend,
        draft_runner.draft_attn_backend,
        draft.cuda_graph_runner,
        draft.draft_extend_attn_backend,
        draft.cuda_graph_runner_for_draft_extend,
        target_runner.attn_backend,
        target_runner.graph_runner,
    )
    for holder in holders:
        holder.speculative_num_steps = state.speculative_num_steps
        holder.speculative_num_draft_tokens = state.speculative_num_draft_tokens
    draft.draft_attn_backend = draft_runner.draft_attn_backend = state.draft_attn_backend
    draft.cuda_graph_runner = state.cuda_graph_runner
    draft.draft_extend_attn_backend = state.draft_extend_attn_backend
    draft.cuda_graph_runner_for_draft_extend = state.cuda_graph_runner_for_draft_extend
    target_runner.attn_backend, target_runner.graph_runner = state.target_attn_backend, state.target_graph_runner
    try:
        yield
    finally:
        for holder, (steps, tokens) in zip(holders, before, strict=True):
            holder.speculative_num_steps, holder.speculative_num_draft_tokens = steps, tokens
        (
            draft.draft_attn_backend,
            draft_runner.draft_attn_backend,
            draft.cuda_graph_runner,
            draft.draft_extend_attn_backend,
            draft.cuda_graph_runner_for_draft_extend,
            target_runner.attn_backend,
            target_runner.graph_runner,
        ) = stages
