"""SGLang's EAGLE operators in plain PyTorch, for machines without a GPU.

Written from the call sites in SGLang 0.5.12 and 0.5.23 (speculative/eagle_utils.py, eagle_info.py, eagle_info_v2.py,
spec_utils.py). Output tensors are filled in place, as the compiled operators do. ``bs`` is the number of requests,
``n`` the draft tokens of one request (node 0 is the bonus token, the root), ``V`` the vocabulary.
"""

import torch
from torch import Tensor

__all__ = [
    "assign_draft_cache_locs",
    "assign_extend_cache_locs",
    "assign_req_to_token_pool",
    "build_tree_kernel_efficient",
    "fast_topk",
    "fill_bonus_tokens",
    "top_k_renorm_prob",
    "top_p_renorm_prob",
    "tree_speculative_sampling_target_only",
    "verify_tree_greedy",
]

FULL_MASK = 0  # sglang TreeMaskMode: rows of prefix + n columns, requests one after the other
QLEN_ONLY = 1  # the n x n part alone


# ---------------------------------------------------------------- the draft tree
def tree_parents(parent_list: Tensor, selected_index: Tensor, topk: int) -> Tensor:
    """Parent node of every node, [bs, n]; the root's and an orphan's is -1.

    selected_index [bs, n-1] holds the candidate slots that became nodes 1..n-1, ascending. Slot s < topk hangs on the
    root; any other slot's parent is the slot ``parent_list[b, s // topk]``. With probabilities of exactly 1 a child
    can be selected without its parent: such an orphan can never be reached by verification.
    """
    bs, chosen = selected_index.shape
    slots = int(max(selected_index.max(), parent_list.max() if parent_list.numel() else 0)) + 1
    node_of_slot = torch.full((bs, slots), -1, dtype=torch.long)
    node_of_slot.scatter_(1, selected_index, torch.arange(1, chosen + 1).expand(bs, chosen))
    group = selected_index // topk
    if parent_list.shape[1] == 0:  # one draft step: every node hangs on the root
        parents = torch.zeros_like(selected_index)
    else:
        parent_slot = parent_list.gather(1, group.clamp(max=parent_list.shape[1] - 1)).clamp(min=0)
        parents = torch.where(group == 0, 0, node_of_slot.gather(1, parent_slot))
    return torch.cat([torch.full((bs, 1), -1), parents], dim=1)


def tree_ancestors(parents: Tensor, depth: int) -> Tensor:
    """Visibility among the nodes of a request, bool [bs, n, n]: a node sees itself, its ancestors and the root."""
    bs, n = parents.shape
    step = torch.zeros(bs, n, n)
    step.scatter_(2, parents.clamp(min=0)[:, :, None], (parents >= 0).float()[:, :, None])
    sees = torch.eye(n).expand(bs, n, n)
    for _ in range(depth):
        sees = (sees + sees @ step).clamp(max=1)
    sees[:, :, 0] = 1
    return sees.bool()


def build_tree_kernel_efficient(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int = FULL_MASK,
) -> None:
    """Lay out the draft tree: attention mask, positions, and first-child / next-sibling links (-1: none)."""
    bs, n = verified_seq_len.numel(), draft_token_num
    parents = tree_parents(parent_list.long(), selected_index.long(), topk)
    sees = tree_ancestors(parents, depth)
    positions[: bs * n] = (verified_seq_len[:, None] + sees.sum(-1) - 1).flatten().to(positions.dtype)
    retrieve_index.copy_(torch.arange(bs * n).view(bs, n))
    is_child = (parents[:, None, :] == torch.arange(n)[None, :, None]) & (parents[:, None, :] >= 0)
    retrieve_next_token.copy_(_first_true(is_child))
    later_sibling = (parents[:, :, None] == parents[:, None, :]) & (parents[:, :, None] >= 0)
    retrieve_next_sibling.copy_(_first_true(later_sibling & torch.ones(n, n, dtype=torch.bool).triu(1)))
    if tree_mask_mode == QLEN_ONLY:
        tree_mask[: bs * n * n] = sees.flatten().to(tree_mask.dtype)
    elif tree_mask_mode == FULL_MASK:
        start = 0
        for request, prefix in enumerate(verified_seq_len.tolist()):
            rows = tree_mask[start : start + n * (prefix + n)].view(n, prefix + n)
            rows[:, :prefix] = True
            rows[:, prefix:] = sees[request]
            start += rows.numel()
    else:
        raise NotImplementedError("a bit-packed tree mask has no CPU stand-in in specdec")


def _first_true(mask: Tensor) -> Tensor:
    """Index of the first true entry along the last dimension, -1 where there is none."""
    return torch.where(mask.any(-1), mask.int().argmax(-1), -1)


# ---------------------------------------------------------------- verification
def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk down from the root as long as a child is the target's own choice.

    Fills predicts [bs*n(+1)] at the visited nodes with the target's tokens, accept_index [bs, depth+1] with the visited
    nodes' flat indices (-1 beyond), accept_token_num [bs] with the accepted draft tokens (bonus not counted).
    """
    bs, depth = accept_index.shape
    candidate, child, sibling = candidates.tolist(), retrive_next_token.tolist(), retrive_next_sibling.tolist()
    index, target = retrive_index.tolist(), target_predict.tolist()
    accepted = [[-1] * depth for _ in range(bs)]
    visited: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    for b in range(bs):
        node, count = 0, 0
        while True:
            accepted[b][count] = index[b][node]
            visited.append(index[b][node])
            tokens.append(target[b][node])
            if count + 1 == depth:
                break
            draft = child[b][node]
            while draft != -1 and candidate[b][draft] != target[b][node]:
                draft = sibling[b][draft]
            if draft == -1:
                break
            node, count = draft, count + 1
        counts.append(count)
    predicts[torch.tensor(visited)] = torch.tensor(tokens, dtype=predicts.dtype)
    accept_index.copy_(torch.tensor(accepted, dtype=accept_index.dtype))
    accept_token_num.copy_(torch.tensor(counts, dtype=accept_token_num.dtype))


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Sample down the tree so that the tokens follow the target's distribution (target_probs [bs, n, V]).

    At a node one coin decides among all its children: child i is taken when the coin falls into its own slice of the
    target's probability mass. If it falls beyond the children, the bonus token is drawn from the target's mass without
    the children's. Both thresholds at 1 make this exact; lower ones trade exactness for acceptance, as in SGLang.
    """
    bs, depth = accept_index.shape
    candidate, child, sibling = candidates.tolist(), retrive_next_token.tolist(), retrive_next_sibling.tolist()
    index, coins = retrive_index.tolist(), uniform_samples.tolist()
    for b in range(bs):
        node, count, rejected = 0, 0, []  # type: int, int, list[int]
        accept_index[b, 0] = index[b][0]
        while count + 1 < depth:
            draft, mass, rejected = child[b][node], 0.0, []
            while draft != -1:
                probability = float(target_probs[b, node, candidate[b][draft]])
                mass += probability
                if coins[b][node] < mass / threshold_acc or probability >= threshold_single:
                    break
                rejected.append(candidate[b][draft])
                draft = sibling[b][draft]
            if draft == -1:
                break
            predicts[index[b][node]] = candidate[b][draft]
            node, count, rejected = draft, count + 1, []
            accept_index[b, count] = index[b][node]
        accept_token_num[b] = count
        rest = target_probs[b, node].clone()
        rest[rejected] = 0
        reached = rest.cumsum(0)  # its last entry, not rest.sum(), which rounds differently: the draw must fall below
        predicts[index[b][node]] = int((reached > uniform_samples_for_final_sampling[b] * reached[-1]).int().argmax())


def top_k_renorm_prob(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Keep each row's top_ks[row] most probable tokens of probs [rows, V] and renormalise."""
    k = top_ks.reshape(-1, 1).long().clamp(min=1, max=probs.shape[-1])
    threshold = probs.sort(dim=-1, descending=True).values.gather(1, k.expand(probs.shape[0], 1) - 1)
    kept = torch.where(probs >= threshold, probs, 0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_prob(probs: Tensor, top_ps: Tensor) -> Tensor:
    """Keep each row's smallest set of tokens of probs [rows, V] whose mass reaches top_ps[row] and renormalise."""
    ordered, token = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    ordered = torch.where(before < top_ps.reshape(-1, 1), ordered, 0)
    kept = torch.zeros_like(probs).scatter_(1, token, ordered)
    return kept / kept.sum(-1, keepdim=True)


def fast_topk(values: Tensor, topk: int, dim: int) -> tuple[Tensor, Tensor]:
    """The topk largest values and their indices along dim."""
    result = values.max(dim=dim, keepdim=True) if topk == 1 else values.topk(topk, dim=dim)
    return result.values, result.indices


# ---------------------------------------------------------------- KV cache slots
def ragged_positions(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """(request, position) of every position in [start_i, end_i), requests one after the other."""
    start, length = start.long(), (end - start).long()
    request = torch.repeat_interleave(torch.arange(length.numel()), length)
    first = length.cumsum(0) - length
    return request, torch.arange(request.numel()) - first[request] + start[request]


def assign_req_to_token_pool(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor
) -> None:
    """Write the slots out_cache_loc into each request's row of req_to_token at positions [start, end)."""
    request, position = ragged_positions(start, end)
    slots = out_cache_loc[: request.numel()].to(req_to_token.dtype)
    req_to_token[req_pool_indices.long()[request], position] = slots


def assign_extend_cache_locs(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor
) -> None:
    """Read each request's slots at positions [start, end) into out_cache_loc."""
    request, position = ragged_positions(start, end)
    slots = req_to_token[req_pool_indices.long()[request], position]
    out_cache_loc[: request.numel()] = slots.to(out_cache_loc.dtype)


def assign_draft_cache_locs(
    req_pool_indices: Tensor, req_to_token: Tensor, seq_lens: Tensor, out_cache_loc: Tensor, slots_per_request: int
) -> None:
    """Read the slots_per_request slots after each request's committed tokens into out_cache_loc."""
    position = seq_lens.long()[:, None] + torch.arange(slots_per_request)
    out_cache_loc.copy_(req_to_token[req_pool_indices.long()[:, None], position].flatten())


def fill_bonus_tokens(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, stride: int) -> None:
    """The last accepted token of each request; accept_tokens is flat with stride entries a request."""
    last = torch.arange(accept_lens.numel()) * stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last].to(bonus_tokens.dtype))
