"""CPU support for SGLang 0.5.12: an attention backend that honours the draft tree, and stand-ins for Triton kernels.

The backend takes the name ``torch_native``, which SGLang 0.5.12 accepts on a CPU and whose own implementation knows
neither a tree mask nor the draft's steps. Servers without speculation run on it too, so that arms compare alike.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from specdec.cpu import operators

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DenseMetadata:
    """Every request asks the same number of queries: one gather and one attention call for the whole batch."""

    slots: Tensor  # [rows, kv_len] slots of the KV pool
    visible: Tensor  # bool, broadcastable to [rows, heads, queries, kv_len]
    queries: int  # queries of a row


@dataclass(frozen=True)
class RaggedMetadata:
    """Requests of different query lengths (prefill, draft extend of a tree): one attention call per request."""

    requests: list[tuple[slice, Tensor, Tensor]]  # queries, slots [kv_len], visible [queries, kv_len]


class TorchTreeAttention(AttentionBackend):  # type: ignore[misc]
    """Attention over the paged KV pool for prefill, decode, tree verify, draft decode and draft extend."""

    def __init__(self, draft_step: int | None = None, topk: int = 1, draft_steps: int = 0) -> None:
        super().__init__()
        self.draft_step, self.topk, self.draft_steps = draft_step, topk, draft_steps
        self.metadata: DenseMetadata | RaggedMetadata | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.metadata = None
        elif mode.is_decode() and self.draft_step is not None:
            self.metadata = self._draft_decode(forward_batch)
        elif mode.is_decode():
            self.metadata = self._uniform(forward_batch, forward_batch.seq_lens.long(), queries=1)
        elif mode.is_target_verify():
            self.metadata = self._verify(forward_batch)
        else:
            self.metadata = self._extend(forward_batch)

    def _uniform(self, forward_batch: Any, kv_lens: Tensor, queries: int) -> DenseMetadata:
        """Each request's last ``queries`` positions look causally at its first kv_lens[i] positions."""
        position = torch.arange(int(kv_lens.max()))
        last_seen = (kv_lens - queries)[:, None] + torch.arange(queries)
        visible = position <= last_seen[:, :, None]  # [bs, queries, kv_len]
        table = forward_batch.req_to_token_pool.req_to_token[forward_batch.req_pool_indices.long()]
        slots = torch.where(position < kv_lens[:, None], table[:, : position.numel()], 0).long()
        return DenseMetadata(slots, visible[:, None], queries)

    def _draft_decode(self, forward_batch: Any) -> DenseMetadata:
        """Branch t of a request sees the committed prefix and its own drafted slots so far.

        Slots after the prefix lie branch by branch: [branch 0: step 0, 1, ..][branch 1: step 0, 1, ..].
        """
        assert self.draft_step is not None
        prefix = forward_batch.seq_lens.long()[:, None, None]
        drafted = self.draft_step + 1
        position = torch.arange(int(prefix.max()) + drafted)[None, None, :]
        branch = torch.arange(self.topk)[None, :, None]
        visible = (position < prefix + drafted).expand(-1, self.topk, -1)
        column = torch.where(position < prefix, position, position + branch * self.draft_steps)
        row = forward_batch.req_pool_indices.long()[:, None, None]
        slots = forward_batch.req_to_token_pool.req_to_token[row, torch.where(visible, column, 0)].long()
        rows = slots.shape[0] * self.topk
        return DenseMetadata(slots.view(rows, -1), visible.reshape(rows, 1, 1, -1), queries=1)

    def _verify(self, forward_batch: Any) -> DenseMetadata:
        """All nodes of the draft tree at once; the tree mask holds rows of prefix + nodes columns per request."""
        nodes = forward_batch.spec_info.draft_token_num
        prefix = forward_batch.seq_lens.long()
        causal = self._uniform(forward_batch, prefix + nodes, queries=nodes)
        if nodes == 1:  # a plain step: the bonus token sees all
            return causal
        visible = torch.zeros(prefix.numel(), 1, nodes, causal.slots.shape[1], dtype=torch.bool)
        start = 0
        for request, length in enumerate((prefix + nodes).tolist()):
            rows = forward_batch.spec_info.custom_mask[start : start + nodes * length]
            visible[request, 0, :, :length] = rows.view(nodes, length)
            start += nodes * length
        return DenseMetadata(causal.slots, visible, nodes)

    def _extend(self, forward_batch: Any) -> DenseMetadata | RaggedMetadata:
        """Prefill, mixed prefill and decode, and draft extend: causal, with a query length per request."""
        kv_lens = forward_batch.seq_lens.long()
        queries = forward_batch.extend_seq_lens.tolist()
        if len(set(queries)) == 1:
            return self._uniform(forward_batch, kv_lens, queries[0])
        table = forward_batch.req_to_token_pool.req_to_token
        requests, start = [], 0
        for row, kv_len, count in zip(forward_batch.req_pool_indices.tolist(), kv_lens.tolist(), queries, strict=True):
            last_seen = torch.arange(kv_len - count, kv_len)
            visible = torch.arange(kv_len) <= last_seen[:, None]
            requests.append((slice(start, start + count), table[row, :kv_len].long(), visible))
            start += count
        return RaggedMetadata(requests)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        pool = forward_batch.token_to_kv_pool
        if save_kv_cache:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)

        def attention(query: Tensor, slots: Tensor, visible: Tensor) -> Tensor:
            """query [rows, queries, heads, dim], slots [rows, kv_len] -> [rows, queries, heads, value dim]."""
            return F.scaled_dot_product_attention(
                query.transpose(1, 2),
                keys[slots].to(q.dtype).transpose(1, 2),
                values[slots].to(q.dtype).transpose(1, 2),
                attn_mask=visible,
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            ).transpose(1, 2)

        if isinstance(self.metadata, DenseMetadata):
            rows = q.view(-1, self.metadata.queries, *q.shape[1:])
            out = attention(rows, self.metadata.slots, self.metadata.visible)
        else:
            assert self.metadata is not None, "init_forward_metadata was not called"
            out = torch.cat(
                [attention(q[None, part], slots[None], visible)[0] for part, slots, visible in self.metadata.requests]
            )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    forward_decode = forward_extend  # the metadata tells the two apart

    def support_triton(self) -> bool:
        return False


class TorchMultiStepDraft:
    """One backend per draft step; the last step only samples, so it needs none."""

    def __init__(self, topk: int, draft_steps: int) -> None:
        self.attn_backends = [TorchTreeAttention(step, topk, draft_steps) for step in range(draft_steps)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends[:-1]:
            backend.init_forward_metadata(forward_batch)


class Launcher:
    """Gives a function the call form of a Triton kernel: ``kernel[grid](...)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.function


# Signatures of the Triton kernels in speculative/spec_utils.py and eagle_info_v2.py; trailing sizes are theirs.
def _assign_req_to_token_pool(req: Tensor, table: Tensor, start: Tensor, end: Tensor, out: Tensor, *sizes: int) -> None:
    operators.assign_req_to_token_pool(req, table, start, end, out)


def _assign_extend_cache_locs(req: Tensor, table: Tensor, start: Tensor, end: Tensor, out: Tensor, *sizes: int) -> None:
    operators.assign_extend_cache_locs(req, table, start, end, out)


def _assign_draft_cache_locs(
    req: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    new_pages: Tensor,
    out: Tensor,
    source: Tensor,
    target: Tensor,
    last_page_lens: Tensor,
    duplicate: int,
    pool_len: int,
    topk: int,
    steps: int,
    page_size: int,
    *sizes: int,
) -> None:
    """v1's kernel writes the freshly allocated slots into the table (v2's reads them from it)."""
    if page_size > 1 and topk > 1:
        raise NotImplementedError("specdec's CPU support has no draft tree with --page-size above 1")
    per_request = topk * steps
    operators.assign_req_to_token_pool(req, table, seq_lens, seq_lens + per_request, out)


def _assign_draft_cache_locs_page_size_1(
    req: Tensor, table: Tensor, seq_lens: Tensor, out: Tensor, pool_len: int, topk: int, steps: int
) -> None:
    operators.assign_draft_cache_locs(req, table, seq_lens, out, topk * steps)


def _create_extend_after_decode_spec_info(
    accept_tokens: Tensor, seq_lens: Tensor, accept_lens: Tensor, positions: Tensor, bonus: Tensor, *sizes: int
) -> None:
    """v1: positions of the accepted tokens (ragged), and the last of each request as its bonus token."""
    _, position = operators.ragged_positions(seq_lens - accept_lens, seq_lens)
    positions[: position.numel()] = position.to(positions.dtype)
    bonus.copy_(accept_tokens[accept_lens.long().cumsum(0) - 1].to(bonus.dtype))


def _fill_bonus_tokens(accept_tokens: Tensor, accept_lens: Tensor, bonus: Tensor, stride: int) -> None:
    operators.fill_bonus_tokens(accept_tokens, accept_lens, bonus, stride)


TRITON_KERNELS: dict[str, Callable[..., None]] = {
    "assign_req_to_token_pool": _assign_req_to_token_pool,
    "assign_extend_cache_locs": _assign_extend_cache_locs,
    "assign_draft_cache_locs": _assign_draft_cache_locs,
    "assign_draft_cache_locs_page_size_1": _assign_draft_cache_locs_page_size_1,
    "create_extend_after_decode_spec_info": _create_extend_after_decode_spec_info,
    "fill_bonus_tokens": _fill_bonus_tokens,
}


def install() -> None:
    """Put the CPU pieces into SGLang 0.5.12's modules. Called once in each of a server's processes."""
    _install_attention()
    _install_operators()
    _install_device_calls()


def _install_attention() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    def decode_backend(factory: Any) -> TorchMultiStepDraft | None:
        # With one draft step the only draft token comes from the draft extend, with none there is no draft.
        if factory.speculative_num_steps <= 1:
            return None
        return TorchMultiStepDraft(factory.topk, factory.speculative_num_steps)

    ATTENTION_BACKENDS["torch_native"] = lambda runner: TorchTreeAttention()
    DraftBackendFactory.create_decode_backend = decode_backend
    DraftBackendFactory.create_draft_extend_backend = lambda factory: TorchTreeAttention()


def _install_operators() -> None:
    from sglang.srt.speculative import (
        eagle_info,
        eagle_info_v2,
        eagle_utils,
        eagle_worker,
        eagle_worker_v2,
        spec_utils,
    )

    eagle_utils.sgl_build_tree_kernel_efficient = operators.build_tree_kernel_efficient
    eagle_utils._is_cuda = True  # verify_tree_greedy_func: take sgl_kernel's operator, which is ours
    eagle_info_v2._is_cuda = True  # assign_extend_cache_locs_func: take the kernel replaced below
    # False would make v1 verify temperature > 0 greedily without a word.
    eagle_info.TREE_SPEC_KERNEL_AVAILABLE = True
    sampling = ("top_k_renorm_prob", "top_p_renorm_prob", "tree_speculative_sampling_target_only")
    for module in (eagle_info, eagle_info_v2):
        for name in sampling:
            setattr(module, name, getattr(operators, name))
    for module in (spec_utils, eagle_info, eagle_info_v2, eagle_worker, eagle_worker_v2):
        for name, function in TRITON_KERNELS.items():
            if hasattr(module, name):
                setattr(module, name, Launcher(function))


def _install_device_calls() -> None:
    """Calls that only order work between CUDA streams have nothing to do on a CPU."""
    torch.Tensor.record_stream = lambda self, stream: None
    # models/llama.py set_embed() empties the CUDA cache and synchronises, whatever the device.
    torch.cuda.empty_cache = lambda: None
    torch.cuda.synchronize = lambda device=None: None
