"""The operators that SGLang 0.5.23 takes from ``sgl_kernel`` on a CPU, in plain PyTorch.

Written from the call sites in that release (sglang/kernels/ops, layers/attention/intel_amx_backend.py). Names
and argument order are SGLang's; sizes it passes that a tensor already tells are ignored. What operators.py
has under another name is only renamed. Importing this module registers the attention as
``torch.ops.sgl_kernel``.
"""

import ctypes

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from specdec.cpu import operators

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]

build_tree_kernel_efficient_cpu = operators.build_tree_kernel_efficient
verify_tree_greedy_cpu = operators.verify_tree_greedy
fill_bonus_tokens_cpu = operators.fill_bonus_tokens


# ---------------------------------------------------------------- KV cache slots
def assign_req_to_token_pool_cpu(
    req: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    operators.assign_req_to_token_pool(req, req_to_token, start, end, out_cache_loc)


def assign_extend_cache_locs_cpu(
    req: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    operators.assign_extend_cache_locs(req, req_to_token, start, end, out_cache_loc)


def assign_draft_cache_locs_contiguous_cpu(
    req: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    steps: int,
) -> None:
    operators.assign_draft_cache_locs(req, req_to_token, seq_lens, out_cache_loc, topk * steps)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """The slots of the accepted nodes, request after request, without gaps (accept_index is -1 beyond)."""
    accepted = accept_index.flatten().long()
    slots = out_cache_loc[accepted[accepted >= 0]]
    accept_out_cache_loc[: slots.numel()] = slots


def copy_all_layer_kv_cache_cpu(buffers: Tensor, row_bytes: Tensor, to_slots: Tensor, from_slots: Tensor) -> None:
    """Copy rows inside every layer's K and V buffer; each is given by its address and the bytes of a row."""
    if to_slots.numel() == 0:
        return
    target, source = to_slots.numpy(), from_slots.numpy()
    rows = int(max(target.max(), source.max())) + 1
    for address, size in zip(buffers.tolist(), row_bytes.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * size)).from_address(address)
        view = np.frombuffer(memory, dtype=np.uint8).reshape(rows, size)
        view[target] = view[source]  # the right side is a copy, so slots may overlap


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, steps: int, pool_len: int
) -> Tensor:
    """A row of slots for each (request, branch), [bs * topk, longest prefix + steps]: the prefix, then the
    branch's own.

    Slots after the prefix lie branch by branch in the request's row: [branch 0: step 0, 1, ..][branch 1: ..].
    """
    prefix = seq_lens.long()[:, None, None]
    column = torch.arange(int(seq_lens.max()) + steps)
    own = torch.arange(topk)[None, :, None] * steps
    column = torch.where(column < prefix, column, column + own).clamp(max=req_to_token.shape[1] - 1)
    rows = req_to_token[req_pool_indices.long()[:, None, None], column]
    return rows.view(-1, column.shape[-1])


# ---------------------------------------------------------------- attention over the paged KV pool
def decode_attention_cpu(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    o: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    loc: Tensor | None,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One query a request over its first seq_lens[i] slots; k and v, if given, first go to the slots loc."""
    _reject(k_scale, v_scale, logit_cap, is_cross_attn, sliding_window, encoder_lens, sinks)
    if k is not None and v is not None and loc is not None:
        k_buffer[loc.long()] = k.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc.long()] = v.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    if q.shape[0] > 0:
        table = req_to_token[req_pool_indices.long()]
        _attend(q, k_buffer, v_buffer, o, table, seq_lens.long(), 1, None, sm_scale)


def extend_attention_cpu(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    o: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """extend_seq_lens[i] queries a request, the last of its seq_lens[i] slots (already written), causal or by
    tree.

    tree_mask: the nodes' view of each other, flat [bs * n * n] (may be longer), for n queries in every
    request.
    """
    _reject(k_scale, v_scale, logit_cap, is_cross_attn, sliding_window, encoder_lens, sinks)
    if not is_causal:
        raise NotImplementedError("specdec's CPU support has no encoder attention")
    if q.shape[0] == 0:
        return
    table, kv_lens, queries = req_to_token[req_pool_indices.long()], seq_lens.long(), extend_seq_lens.tolist()
    if len(set(queries)) == 1:
        n = queries[0]
        nodes = None if tree_mask is None else tree_mask[: len(queries) * n * n].view(-1, n, n).bool()
        _attend(q, k_buffer, v_buffer, o, table, kv_lens, n, nodes, sm_scale)
        return
    for i, (start, n) in enumerate(zip(extend_start_loc.tolist(), queries, strict=True)):
        if n > 0:
            part, one = slice(start, start + n), slice(i, i + 1)
            _attend(q[part], k_buffer, v_buffer, o[part], table[one], kv_lens[one], n, None, sm_scale)


def _reject(
    k_scale: float,
    v_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    other = logit_cap or is_cross_attn or sliding_window > 0 or encoder_lens is not None or sinks is not None
    if other or k_scale != 1 or v_scale != 1:
        raise NotImplementedError("specdec's CPU attention knows full self-attention without scales, caps and sinks")


def _attend(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    out: Tensor,
    table: Tensor,
    kv_lens: Tensor,
    queries: int,
    nodes: Tensor | None,
    scale: float,
) -> None:
    """q, out [bs * queries, heads, dim]; table [bs, pool_len] holds each request's slots, kv_lens[i] of them
    in use.

    A request's queries are its last positions. Each sees what is before it, or, among the queries, what nodes
    [bs, queries, queries] says.
    """
    position = torch.arange(int(kv_lens.max()))
    slots = torch.where(position < kv_lens[:, None], table[:, : position.numel()], 0).long()
    asked = (kv_lens - queries)[:, None, None]  # the first query's position
    if nodes is None:
        visible = position <= asked + torch.arange(queries)[:, None]
    else:
        node = (position - asked).clamp(0, queries - 1).expand(-1, queries, -1)
        visible = ((position < asked) | nodes.gather(2, node)) & (position < kv_lens[:, None, None])
    attended = F.scaled_dot_product_attention(
        q.view(-1, queries, *q.shape[1:]).transpose(1, 2),
        k_buffer[slots].to(q.dtype).transpose(1, 2),
        v_buffer[slots].to(q.dtype).transpose(1, 2),
        attn_mask=visible[:, None],
        scale=scale,
        enable_gqa=q.shape[1] != k_buffer.shape[1],
    )
    out.copy_(attended.transpose(1, 2).reshape(out.shape))


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define(
    "decode_attention_cpu(Tensor q, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, float v_scale, "
    "Tensor(c!) o, Tensor? k, Tensor? v, Tensor? loc, Tensor attn_logits, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross_attn, "
    "int sliding_window, Tensor? encoder_lens, Tensor? sinks) -> ()"
)
_library.define(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor k_buffer, Tensor v_buffer, "
    "float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    "Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float sm_scale, float logit_cap, "
    "bool is_cross_attn, int sliding_window, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, "
    "bool is_causal) -> ()"
)
_library.impl("decode_attention_cpu", decode_attention_cpu, "CPU")
_library.impl("extend_attention_cpu", extend_attention_cpu, "CPU")
