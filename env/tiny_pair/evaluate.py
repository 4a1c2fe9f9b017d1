"""Accept length of the pair on held-out prompts, without a server.

With greedy verification the committed text is the target's own greedy continuation, whatever the draft
proposes. So one batched generation gives the text and the states of every position, the draft can be unrolled
from all positions at once, and a request is a walk: from its last committed token, ahead by what is accepted.
"""

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import EOS_ID, read_prompts
from model import EagleDraft, Llama, causal_bias, load_draft, load_target, mix_values, query_key_scores
from torch import Tensor
from torch.nn import functional

HERE = Path(__file__).parent
STEPS = 3


@dataclass(frozen=True)
class Continuation:
    """Token ids [batch, tokens]; captured and final states of all positions but the last token's."""

    ids: Tensor
    captured: Tensor
    final: Tensor


@torch.no_grad()
def generate(
    target: Llama,
    prompts: Tensor,
    new_tokens: int,
    captured_layers: tuple[int, ...],
    temperatures: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Continuation:
    """Continue prompts of equal length. ``temperatures`` [batch, new_tokens]: 0 is greedy, as is None."""
    cache: list = [None] * target.shape.num_hidden_layers
    ids, current, captured, final = [prompts], prompts, [], []
    start = 0
    for index in range(new_tokens):
        states, layers = target(current, captured_layers, cache, start)
        start += current.shape[1]
        captured.append(layers)
        final.append(states)
        logits = target.lm_head(states[:, -1:]).float()
        current = logits.argmax(-1)
        if temperatures is not None:
            warmth = temperatures[:, index]
            chances = (logits[:, 0] / warmth.clamp_min(0.05)[:, None]).softmax(-1)
            sampled = torch.multinomial(chances, 1, generator=generator)
            current = torch.where(warmth[:, None] > 0, sampled, current)
        ids.append(current)
    return Continuation(torch.cat(ids, 1), torch.cat(captured, 1), torch.cat(final, 1))


@torch.no_grad()
def accepted_drafts(
    target: Llama, draft: EagleDraft, target_ids: Tensor, text: Continuation, topk: int, draft_tokens: int
) -> Tensor:
    """Draft tokens accepted in a speculative step that starts at a slot, for all slots [batch, slots].

    Follows SGLang: each step keeps the ``topk`` children of the highest cumulative probability; of all
    candidates the best ``draft_tokens - 1`` are verified. ``topk`` 1 is the chain.
    """
    layer, head = draft.midlayer, draft.logits
    slots = text.captured.shape[1]
    batch = len(text.ids)
    embed = target.model.embed_tokens

    def node_rotation(offset: int) -> tuple[Tensor, Tensor]:
        cosine, sine = target.rotation(offset, offset + slots)
        return cosine.repeat_interleave(topk, 0), sine.repeat_interleave(topk, 0)

    def expand(states: Tensor) -> tuple[Tensor, Tensor]:
        best = head(states).softmax(-1).topk(topk, -1)
        return best.values, target_ids[best.indices]

    states = draft.fc(text.captured)
    queries, keys, values = layer.project(embed(text.ids[:, 1 : slots + 1]), states, target.rotation(0, slots))
    scores = query_key_scores(queries, keys)
    weights = (scores + causal_bias(slots, slots, scores)).softmax(-1)
    states = layer.finish(states, mix_values(weights, values))

    # Nodes of the current front: [batch, slots, topk]. on_path: the node continues the true text so far.
    def truth_at(depth: int) -> Tensor:
        return functional.pad(text.ids, (0, depth + 1), value=-1)[:, 1 + depth : 1 + depth + slots, None]

    chance, token = expand(states)
    on_path = token == truth_at(1)
    all_scores, all_true = [chance], [on_path]
    parent_states = states[:, :, None].expand(-1, -1, topk, -1)
    ancestors: list[tuple[Tensor, Tensor]] = []
    slot_bias = causal_bias(slots, slots, scores).repeat_interleave(topk, 0)
    for depth in range(1, STEPS):
        flat_states = parent_states.reshape(batch, slots * topk, -1)
        flat_tokens = token.reshape(batch, slots * topk)
        queries, own_keys, own_values = layer.project(embed(flat_tokens), flat_states, node_rotation(depth))
        ancestors.append((own_keys, own_values))
        past = query_key_scores(queries, keys) + slot_bias
        recent = [(queries * node_keys[:, :, None]).sum(-1, keepdim=True) for node_keys, _ in ancestors]
        weights = torch.cat([past, *recent], -1).softmax(-1)
        mixed = mix_values(weights[..., :slots], values)
        for index, (_, node_values) in enumerate(ancestors):
            mixed = mixed + weights[..., slots + index, None] * node_values[:, :, None]
        flat_states = layer.finish(flat_states, mixed)

        child_chance, child_token = expand(flat_states)
        child_chance = child_chance.view(batch, slots, topk, topk) * chance[..., None]
        child_token = child_token.view(batch, slots, topk, topk)
        child_true = on_path[..., None] & (child_token == truth_at(depth + 1)[..., None])
        all_scores.append(child_chance.flatten(2))
        all_true.append(child_true.flatten(2))
        best = child_chance.flatten(2).topk(topk, -1)
        chance, chosen = best.values, best.indices
        token, on_path = child_token.flatten(2).gather(2, chosen), child_true.flatten(2).gather(2, chosen)
        parent = chosen // topk
        shaped = flat_states.view(batch, slots, topk, -1)
        parent_states = shaped.gather(2, parent[..., None].expand(-1, -1, -1, shaped.shape[-1]))
        flat_parent = (torch.arange(slots)[:, None] * topk + parent).view(batch, 1, slots * topk, 1)
        ancestors = [
            tuple(part.gather(2, flat_parent.expand(-1, part.shape[1], -1, part.shape[-1])) for part in pair)
            for pair in ancestors
        ]
    candidates = torch.cat(all_scores, -1)
    verified = torch.zeros_like(candidates, dtype=torch.bool)
    kept = candidates.topk(min(draft_tokens - 1, candidates.shape[-1]), -1).indices
    verified.scatter_(-1, kept, True)
    # A true node's parent is true and scores at least as high: the true verified nodes are the accepted path.
    return (torch.cat(all_true, -1) & verified).sum(-1)


def accept_length(accepted: Tensor, prompt_tokens: int, new_tokens: int) -> tuple[float, float]:
    """Walk every request. Returns tokens per step over all steps, and the standard error over prompts."""
    committed, steps = [], []
    for row in accepted.tolist():
        # Prefill commits the first new token; slot i starts the step that follows committed token i + 1.
        slot, count = prompt_tokens - 1, 0
        while slot - (prompt_tokens - 1) < new_tokens - 1:
            slot += row[slot] + 1
            count += 1
        committed.append(slot - (prompt_tokens - 1))
        steps.append(count)
    ratio = sum(committed) / sum(steps)
    residual = torch.tensor(committed).double() - ratio * torch.tensor(steps).double()
    error = residual.pow(2).sum().sqrt() / sum(steps)
    return ratio, error.item()


def looping_share(ids: Tensor, longest_period: int = 24) -> float:
    """Share of rows whose last 48 tokens repeat with some period up to ``longest_period``."""
    looping = 0
    for row in ids[:, -48:].tolist():
        looping += any(row[period:] == row[:-period] for period in range(1, longest_period + 1))
    return looping / len(ids)


def repeated_fours(ids: Tensor) -> float:
    """Share of four-token runs that stood earlier in the same row."""
    repeated = total = 0
    for row in ids.tolist():
        runs = Counter(tuple(row[start : start + 4]) for start in range(len(row) - 3))
        total += sum(runs.values())
        repeated += sum(runs.values()) - len(runs)
    return repeated / total


def measure(target: Llama, draft: EagleDraft, target_ids: Tensor, prompts: Tensor, new_tokens: int = 96) -> dict:
    """Accept lengths and what the continuations look like."""
    prompt_tokens = prompts.shape[1]
    text = generate(target, prompts, new_tokens + STEPS + 2, draft.captured_layers)
    result: dict = {"prompts": len(prompts), "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    for name, topk, draft_tokens in (("chain_3_1_4", 1, 4), ("tree_3_4_16", 4, 16)):
        accepted = accepted_drafts(target, draft, target_ids, text, topk, draft_tokens)
        length, error = accept_length(accepted, prompt_tokens, new_tokens)
        result[name] = round(length, 3)
        result[name + "_standard_error"] = round(error, 3)
    written = text.ids[:, prompt_tokens : prompt_tokens + new_tokens]
    result["looping_share"] = round(looping_share(written), 3)
    result["repeated_four_token_runs"] = round(repeated_fours(written), 3)
    result["distinct_tokens_per_row"] = round(sum(len(set(row)) for row in written.tolist()) / len(written), 1)
    result["rows_with_end_of_sequence"] = int((written == EOS_ID).any(1).sum())
    return result


def main() -> None:
    """Print the measurements of a pair as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--draft", type=Path, default=HERE / "draft")
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts_heldout.jsonl")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = load_target(options.target)
    draft, target_ids = load_draft(options.draft, target)
    prompts = read_prompts(options.prompts, options.count, options.prompt_tokens)
    print(json.dumps(measure(target, draft, target_ids, prompts, options.new_tokens), indent=1))


if __name__ == "__main__":
    main()
