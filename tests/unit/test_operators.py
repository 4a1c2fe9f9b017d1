"""The CPU operators of both releases against references that are slow and obvious.

SGLang 0.5.12 calls those of operators.py; 0.5.23 calls the same under other names, and a few more.
"""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.cpu import kernels_0_5_23, operators

pytestmark = pytest.mark.filterwarnings("error")
SEEDS = st.integers(0, 2**32 - 1)


# ---------------------------------------------------------------- trees as a reference draws them
@dataclass(frozen=True)
class Tree:
    """A draft tree as nested facts: the parent of every node but the root, parents before children."""

    parents: list[int]  # of node 1, 2, ..

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents, start=1) if parent == node]

    def path(self, node: int) -> list[int]:
        """The node, its parent, .. down to the root."""
        return [node] if node == 0 else [node, *self.path(self.parents[node - 1])]

    def __len__(self) -> int:
        return len(self.parents) + 1


def drafted(seed: int, batch_size: int, topk: int, steps: int, nodes: int) -> tuple[Tensor, Tensor, list[Tree]]:
    """parent_list, selected_index and the trees of a draft, made as SGLang's draft loop makes them.

    Step 0 yields topk slots below the root; every later step continues the topk best slots of the step before
    with topk children each. The nodes-1 best slots of all become the tree, in the order of their slots.
    """
    random = torch.Generator().manual_seed(seed)
    parent_lists, selections, trees = [], [], []
    for _ in range(batch_size):
        scores = torch.rand(topk, generator=random).tolist()
        parent_of = [-1] * topk  # slot -> parent slot, -1: the root
        continued = list(range(topk))
        parent_list = [-1, *continued]
        for _ in range(1, steps):
            first = len(scores)
            for slot in continued:
                scores += [scores[slot] * p for p in (torch.rand(topk, generator=random) * 0.98 + 0.01).tolist()]
                parent_of += [slot] * topk
            continued = sorted(range(first, len(scores)), key=lambda s: -scores[s])[:topk]
            parent_list += continued
        selected = sorted(sorted(range(len(scores)), key=lambda s: -scores[s])[: nodes - 1])
        node_of = {slot: node for node, slot in enumerate(selected, start=1)} | {-1: 0}
        trees.append(Tree([node_of[parent_of[slot]] for slot in selected]))
        parent_lists.append(parent_list[: len(parent_list) - topk] if steps > 1 else [])
        selections.append(selected)
    return torch.tensor(parent_lists, dtype=torch.long), torch.tensor(selections), trees


SHAPES = st.sampled_from(
    [(1, 1, 2), (1, 3, 4), (4, 1, 4), (2, 2, 5), (4, 3, 16), (3, 4, 9), (8, 3, 32)]
)  # topk, steps, n


@dataclass(frozen=True)
class Built:
    mask: Tensor
    positions: Tensor
    index: Tensor
    child: Tensor
    sibling: Tensor


def build(
    parent_list: Tensor, selected: Tensor, seq_lens: Tensor, topk: int, steps: int, nodes: int, mode: int
) -> Built:
    bs = seq_lens.numel()
    columns = nodes if mode == operators.QLEN_ONLY else 0
    cells = bs * nodes * columns if columns else int(seq_lens.sum()) * nodes + bs * nodes * nodes
    built = Built(
        torch.zeros(cells, dtype=torch.bool),
        torch.full((bs * nodes,), -7),
        *(torch.full((bs, nodes), -7) for _ in range(3)),
    )
    outputs = (built.mask, built.positions, built.index, built.child, built.sibling)
    kernels_0_5_23.build_tree_kernel_efficient_cpu(parent_list, selected, seq_lens, *outputs, topk, steps, nodes, mode)
    return built


@settings(deadline=None, max_examples=60)
@given(SEEDS, SHAPES, st.lists(st.integers(1, 40), min_size=1, max_size=4), st.sampled_from([0, 1]))
def test_tree_layout(seed: int, shape: tuple[int, int, int], prefixes: list[int], mode: int) -> None:
    topk, steps, nodes = shape
    parent_list, selected, trees = drafted(seed, len(prefixes), topk, steps, nodes)
    built = build(parent_list, selected, torch.tensor(prefixes), topk, steps, nodes, mode)
    start = 0
    for b, (tree, prefix) in enumerate(zip(trees, prefixes, strict=True)):
        before = prefix if mode == operators.FULL_MASK else 0
        rows = built.mask[start : start + nodes * (before + nodes)].view(nodes, before + nodes)
        start += rows.numel()
        for node in range(nodes):
            path = tree.path(node)
            assert rows[node, :before].all()
            assert {column for column in range(nodes) if rows[node, before + column]} == set(path)
            assert built.positions[b * nodes + node] == prefix + len(path) - 1
            assert built.index[b, node] == b * nodes + node
            found = [int(built.child[b, node])]
            while found[-1] != -1:
                found.append(int(built.sibling[b, found[-1]]))
            assert found[:-1] == tree.children(node), "first child and siblings lead through all children in order"


def test_a_child_without_its_parent_is_out_of_reach() -> None:
    """With probabilities of exactly 1 a child ties with its parent and can be selected without it."""
    parent_list = torch.tensor([[-1, 0, 1]])  # topk 2; slots 2, 3 below slot 0, slots 4, 5 below slot 1
    built = build(parent_list, torch.tensor([[0, 2, 4]]), torch.tensor([5]), 2, 2, 4, operators.QLEN_ONLY)
    reachable, waiting = set(), [0]
    while waiting:
        node = waiting.pop()
        reachable.add(node)
        waiting += [int(link) for link in (built.child[0, node], built.sibling[0, node]) if link != -1]
    assert reachable == {0, 1, 2}


# ---------------------------------------------------------------- verification
def links(tree: Tree) -> tuple[list[int], list[int]]:
    """First child and next sibling of every node, -1: none."""
    child = [min(tree.children(node), default=-1) for node in range(len(tree))]
    sibling = [-1] * len(tree)
    for node in range(len(tree)):
        for left, right in zip(tree.children(node), tree.children(node)[1:], strict=False):
            sibling[left] = right
    return child, sibling


def best_path(tree: Tree, tokens: list[int], wanted: list[int], depth: int) -> list[int]:
    """The longest way from the root on which every draft token is what the target wanted at its parent."""
    ways = [tree.path(node)[::-1] for node in range(len(tree))]
    right = [w for w in ways if all(tokens[b] == wanted[a] for a, b in itertools.pairwise(w))]
    return max((way for way in right if len(way) <= depth + 1), key=len)


@settings(deadline=None, max_examples=60)
@given(SEEDS, SHAPES, st.integers(1, 3))
def test_greedy_verification_finds_the_longest_right_path(seed: int, shape: tuple[int, int, int], bs: int) -> None:
    topk, steps, n = shape
    _, _, trees = drafted(seed, bs, topk, steps, n)
    random = torch.Generator().manual_seed(seed)
    candidates = torch.zeros(bs, n, dtype=torch.long)
    for b, tree in enumerate(trees):  # siblings are different tokens, of few so that paths are often right
        for node in range(n):
            names = torch.randperm(max(topk, 3), generator=random).tolist()
            for child, name in zip(tree.children(node), names, strict=False):
                candidates[b, child] = name
    target = torch.randint(0, 3, (bs, n), generator=random)
    predicts = torch.full((bs * n,), -9, dtype=torch.int32)
    accept_index = torch.full((bs, steps + 1), -9, dtype=torch.int32)
    counts = torch.full((bs,), -9, dtype=torch.int32)
    child, sibling = (torch.tensor(column) for column in zip(*(links(tree) for tree in trees), strict=True))
    kernels_0_5_23.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=counts,
        candidates=candidates,
        retrive_index=torch.arange(bs * n).view(bs, n),
        retrive_next_token=child,
        retrive_next_sibling=sibling,
        target_predict=target,
    )
    for b, tree in enumerate(trees):
        path = best_path(tree, candidates[b].tolist(), target[b].tolist(), steps)
        assert counts[b] == len(path) - 1
        assert accept_index[b].tolist() == [b * n + node for node in path] + [-1] * (steps + 1 - len(path))
        assert predicts[b * n + torch.tensor(path)].tolist() == target[b][path].tolist()


def sampled_sequences(tree: Tree, tokens: list[int], probs: Tensor, depth: int, draws: int, seed: int) -> Tensor:
    """The first two committed tokens of each draw, -1 where only one was committed. probs [n, V]."""
    n, vocabulary = probs.shape
    random = torch.Generator().manual_seed(seed)
    child, sibling = (torch.tensor(column).expand(draws, n) for column in links(tree))
    predicts = torch.zeros(draws * n, dtype=torch.int32)
    accept_index = torch.full((draws, depth + 1), -1, dtype=torch.int32)
    counts = torch.zeros(draws, dtype=torch.int32)
    target = probs.expand(draws, n, vocabulary).contiguous()
    operators.tree_speculative_sampling_target_only(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=counts,
        candidates=torch.tensor(tokens).expand(draws, n),
        retrive_index=torch.arange(draws * n).view(draws, n),
        retrive_next_token=child,
        retrive_next_sibling=sibling,
        uniform_samples=torch.rand(draws, n, generator=random),
        uniform_samples_for_final_sampling=torch.rand(draws, generator=random),
        target_probs=target,
        draft_probs=torch.zeros_like(target),
    )
    assert ((accept_index >= 0).sum(1) == counts + 1).all()
    first = predicts[accept_index[:, 0].long()]
    second = torch.where(counts > 0, predicts[accept_index[:, 1].clamp(min=0).long()], -1) if depth else counts * 0 - 1
    return torch.stack([first, second], dim=1)


def chi_square_p(observed: Tensor, expected: Tensor) -> float:
    """Probability of a deviation at least this large if the draws follow expected (counts)."""
    assert observed[expected == 0].sum() == 0
    kept = expected > 0
    statistic = ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    half = torch.tensor((int(kept.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic.double() / 2))


SAMPLED = {
    "no draft": (Tree([]), [9], 0),
    "chain": (Tree([0, 1]), [9, 2, 4], 2),
    "tree": (Tree([0, 0, 0, 1, 1, 2]), [9, 0, 3, 5, 1, 4, 2], 2),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_tokens_follow_the_target(name: str) -> None:
    """The first token follows the target at the root, a second one the target at the first's node."""
    tree, tokens, depth = SAMPLED[name]
    draws, vocabulary = 20_000, 6
    probs = torch.softmax(torch.randn(len(tree), vocabulary, generator=torch.Generator().manual_seed(3)) * 1.2, -1)
    probs[:, 3] = 0  # as top-k and top-p leave it: a token out of question, though it may be drafted
    probs /= probs.sum(-1, keepdim=True)
    committed = sampled_sequences(tree, tokens, probs, depth, draws, seed=17)
    seen = torch.bincount(committed[:, 0], minlength=vocabulary)
    assert chi_square_p(seen, probs[0] * draws) > 1e-3
    for node in tree.children(0):
        after = committed[committed[:, 0] == tokens[node], 1]
        assert (after >= 0).all(), "a draft token that was sampled is always accepted"
        if len(after):
            seen = torch.bincount(after, minlength=vocabulary)
            assert chi_square_p(seen, probs[node] * len(after)) > 1e-3


def test_greedy_request_among_sampled_ones() -> None:
    """SGLang gives a greedy request top-k 1, so that its distribution is one token: no other is taken."""
    probs = torch.zeros(3, 6)
    probs[torch.arange(3), torch.tensor([2, 4, 1])] = 1
    committed = sampled_sequences(Tree([0, 1]), [9, 2, 5], probs, 2, 500, seed=5)
    assert committed.tolist() == [[2, 4]] * 500


@settings(deadline=None)
@given(SEEDS, st.lists(st.integers(1, 12), min_size=1, max_size=4), st.floats(0.05, 1.0))
def test_renormalisation(seed: int, top_ks: list[int], top_p: float) -> None:
    probs = torch.softmax(torch.randn(len(top_ks), 10, generator=torch.Generator().manual_seed(seed)) * 2, -1)
    kept = operators.top_k_renorm_prob(probs, torch.tensor(top_ks))
    for row, k, original in zip(kept, top_ks, probs, strict=True):
        best = sorted(original.tolist(), reverse=True)[:k]
        assert sorted(row[row > 0].tolist(), reverse=True) == pytest.approx([p / sum(best) for p in best], rel=1e-4)
    kept = operators.top_p_renorm_prob(probs, torch.full((len(top_ks),), top_p))
    for row, original in zip(kept, probs, strict=True):
        ordered = sorted(original.tolist(), reverse=True)
        count = next(i for i in range(1, 11) if i == 10 or math.fsum(ordered[:i]) >= top_p - 1e-6)
        assert sorted(row[row > 0].tolist(), reverse=True) == pytest.approx(
            [p / math.fsum(ordered[:count]) for p in ordered[:count]], rel=1e-4
        )


# ---------------------------------------------------------------- KV cache slots
def slot_table(seed: int, requests: int, width: int) -> tuple[Tensor, Tensor]:
    """A request-to-slot table with all slots different, and the rows of the requests (shuffled)."""
    random = torch.Generator().manual_seed(seed)
    table = torch.randperm((requests + 2) * width, generator=random).view(requests + 2, width).to(torch.int32)
    return table, torch.randperm(requests + 2, generator=random)[:requests]


@settings(deadline=None)
@given(SEEDS, st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=5))
def test_slots_are_written_and_read_by_position(seed: int, ranges: list[tuple[int, int]]) -> None:
    table, rows = slot_table(seed, len(ranges), 32)
    start = torch.tensor([first for first, _ in ranges])
    end = torch.tensor([first + count for first, count in ranges])
    expected = [int(table[row, p]) for row, (f, c) in zip(rows.tolist(), ranges, strict=True) for p in range(f, f + c)]
    read = torch.full((len(expected) + 3,), -1)
    kernels_0_5_23.assign_extend_cache_locs_cpu(rows, table, start, end, read, 32)
    assert read.tolist() == [*expected, -1, -1, -1]
    fresh = torch.full_like(table, -1)
    kernels_0_5_23.assign_req_to_token_pool_cpu(rows, fresh, start, end, torch.tensor(expected), 32)
    assert int((fresh >= 0).sum()) == len(expected)
    assert (fresh[fresh >= 0] == table[fresh >= 0]).all()


@settings(deadline=None)
@given(SEEDS, st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 4))
def test_draft_branches_read_their_own_slots(seed: int, prefixes: list[int], topk: int, steps: int) -> None:
    table, rows = slot_table(seed, len(prefixes), 32)
    seq_lens = torch.tensor(prefixes)
    seen = kernels_0_5_23.build_draft_decode_metadata_cpu(table, rows, seq_lens, topk, steps, 32)
    own = torch.zeros(len(prefixes) * topk * steps, dtype=torch.int64)
    kernels_0_5_23.assign_draft_cache_locs_contiguous_cpu(rows, table, seq_lens, own, 32, topk, steps)
    for b, (row, prefix) in enumerate(zip(rows.tolist(), prefixes, strict=True)):
        for branch in range(topk):
            first = prefix + branch * steps
            expected = [*table[row, :prefix].tolist(), *table[row, first : first + steps].tolist()]
            assert seen[b * topk + branch, : prefix + steps].tolist() == expected
            assert own.view(-1, topk, steps)[b, branch].tolist() == expected[prefix:]


def test_accepted_slots_and_rows_move_together() -> None:
    accept_index = torch.tensor([[0, 2, -1], [4, -1, -1]])
    out = torch.zeros(6, dtype=torch.int64)
    kernels_0_5_23.fill_accept_out_cache_loc_cpu(accept_index, torch.tensor([10, 11, 12, 13, 14, 15]), out)
    assert out.tolist() == [10, 12, 14, 0, 0, 0]
    layers = [torch.arange(80.0).view(20, 4), torch.arange(40, dtype=torch.int16).view(20, 2)]
    before = [layer.clone() for layer in layers]
    kernels_0_5_23.copy_all_layer_kv_cache_cpu(
        torch.tensor([layer.data_ptr() for layer in layers]),
        torch.tensor([layer.stride(0) * layer.element_size() for layer in layers]),
        torch.tensor([10, 11, 12]),
        torch.tensor([10, 12, 14]),  # 12 is read and written
    )
    for layer, old in zip(layers, before, strict=True):
        assert (layer[[10, 11, 12]] == old[[10, 12, 14]]).all()
        assert (layer[13:] == old[13:]).all()


# ---------------------------------------------------------------- attention
def attend_one(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One query [heads, dim] over keys and values [seen, kv heads, dim], by the formula."""
    group = query.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    weights = torch.softmax(torch.einsum("hd,shd->hs", query, keys) * scale, -1)
    return torch.einsum("hs,shd->hd", weights, values)


@settings(deadline=None, max_examples=30)
@given(
    SEEDS,
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4)), min_size=1, max_size=3),
    st.sampled_from(["decode", "extend", "tree"]),
)
def test_attention_over_the_paged_pool(seed: int, requests: list[tuple[int, int]], kind: str) -> None:
    """(prefix, queries) per request; decode has one query each, a tree the same number for all."""
    random = torch.Generator().manual_seed(seed)
    same = {"decode": 1, "tree": 4}.get(kind)
    requests = [(prefix, same or count) for prefix, count in requests]
    table, rows = slot_table(seed, len(requests), 24)
    heads, kv_heads, dim, scale = 4, 2, 8, 0.3
    k_buffer, v_buffer = (torch.randn(table.numel(), kv_heads, dim, generator=random) for _ in range(2))
    total = sum(count for _, count in requests)
    q = torch.randn(total, heads, dim, generator=random)
    seq_lens = torch.tensor([prefix + count for prefix, count in requests])
    nodes = torch.rand(len(requests), 4, 4, generator=random) < 0.5
    nodes |= torch.eye(4, dtype=torch.bool)
    out = torch.empty_like(q)
    rest = (scale, 0.0, False, 0, None, None)
    if kind == "decode":
        loc = torch.tensor([int(table[r, n - 1]) for r, n in zip(rows.tolist(), seq_lens.tolist(), strict=True)])
        k, v = (torch.randn(total, kv_heads, dim, generator=random) for _ in range(2))
        torch.ops.sgl_kernel.decode_attention_cpu(
            q, k_buffer, v_buffer, 1.0, 1.0, out, k, v, loc, q.new_empty(0), table, rows, seq_lens, *rest
        )
        assert torch.equal(k_buffer[loc], k)
        assert torch.equal(v_buffer[loc], v)
    else:
        counts = torch.tensor([count for _, count in requests])
        starts = counts.cumsum(0) - counts
        mask = nodes.flatten() if kind == "tree" else None
        pool = (1.0, 1.0, table, rows, seq_lens, counts, starts, int(counts.max()))
        torch.ops.sgl_kernel.extend_attention_cpu(q, None, None, out, k_buffer, v_buffer, *pool, *rest, mask, True)
    at = 0
    for b, (row, (prefix, count)) in enumerate(zip(rows.tolist(), requests, strict=True)):
        for i in range(count):
            among = [j for j in range(count) if (nodes[b, i, j] if kind == "tree" else j <= i)]
            seen = table[row, [*range(prefix), *(prefix + j for j in among)]].long()
            expected = attend_one(q[at], k_buffer[seen], v_buffer[seen], scale)
            torch.testing.assert_close(out[at], expected, rtol=1e-4, atol=1e-5)
            at += 1
