"""Train the one-layer EAGLE-3 draft on text that the target writes itself.

Training-time test: at further step k, slot i reads the draft's own output of slot i - 1 at step k - 1 in
place of the target's states, and attends to the first-step keys of slots up to i - k and to its own chain. So
the draft is trained on the inputs it meets when it drafts several tokens ahead.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import SEED, encode_topics, load_tokenizer, load_topics, read_prompts
from evaluate import generate, measure
from model import (
    EagleDraft,
    KeyValue,
    Llama,
    Rotation,
    causal_bias,
    load_draft,
    load_target,
    mix_values,
    query_key_scores,
    save_draft,
)
from torch import Tensor, nn
from torch.nn import functional

HERE = Path(__file__).parent
PROMPT_TOKENS = 32
NEW_TOKENS = 96
GENERATION_BATCH = 256


@dataclass(frozen=True)
class Recipe:
    """Sizes and lengths of the draft's training.

    Stopped early on purpose: 4000 steps on 12 batches reach accept lengths of 2.77 (chain) and 3.53 (tree).
    The tree then no longer clearly loses in a large batch on a CPU, and the pair is to show both sides.
    """

    intermediate_size: int = 768
    written_batches: int = 4
    optimizer_steps: int = 300
    batch: int = 8
    unrolled_steps: int = 3
    step_decay: float = 0.8
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    teacher_temperature: float = 0.5
    log_every: int = 100
    check_every: int = 1000


@dataclass(frozen=True)
class Lesson:
    """Sequences [count, tokens] and the target's states on them, in bfloat16 to fit in memory."""

    ids: Tensor
    captured: Tensor
    final: Tensor


def spliced_prompts(training_ids: Tensor, piece_tokens: int, generator: torch.Generator) -> Tensor:
    """Prompts made of random windows of the training text, ``piece_tokens`` each."""
    pieces = PROMPT_TOKENS // piece_tokens
    count = (GENERATION_BATCH, pieces)
    starts = torch.randint(0, len(training_ids) - piece_tokens, count, generator=generator)
    window = torch.arange(piece_tokens)
    return training_ids[starts[..., None] + window].flatten(1)


@torch.no_grad()
def write_lesson(
    target: Llama,
    captured_layers: tuple[int, ...],
    training_ids: Tensor,
    batches: int,
    generator: torch.Generator,
) -> Lesson:
    """Let the target continue prompts from the training text.

    Held-out prompts are new to the target, so most prompts here are made new as well: spliced from unrelated
    windows, or led astray by a few sampled tokens. A quarter is sampled throughout, for requests with a
    temperature.
    """
    ids, captured, final = [], [], []
    began = time.time()
    for index in range(batches):
        kind = index % 4
        prompts = spliced_prompts(training_ids, (PROMPT_TOKENS, PROMPT_TOKENS // 2, 8, PROMPT_TOKENS)[kind], generator)
        temperatures = torch.zeros(GENERATION_BATCH, NEW_TOKENS)
        if kind == 0:
            temperatures[:, :12] = 1.0
        if kind == 3:
            temperatures.fill_(0.8)
        with torch.autocast("cpu", torch.bfloat16):
            text = generate(target, prompts, NEW_TOKENS, captured_layers, temperatures, generator)
        ids.append(text.ids)
        captured.append(text.captured.bfloat16())
        final.append(text.final.bfloat16())
        if index % 4 == 3:
            print(f"written {index + 1}/{batches} batches after {time.time() - began:.0f} s", flush=True)
    return Lesson(torch.cat(ids), torch.cat(captured), torch.cat(final))


def unroll(draft: EagleDraft, embeddings: Tensor, captured: Tensor, rotation: Rotation, steps: int) -> Iterator[Tensor]:
    """Logits of every slot at each step of the training-time test."""
    layer = draft.midlayer
    states = draft.fc(captured)
    earlier: list[KeyValue] = []
    slots = captured.shape[1]
    for step in range(steps):
        queries, keys, values = layer.project(embeddings, states, rotation)
        earlier.append((keys, values))
        first_keys, first_values = earlier[0]
        scores = query_key_scores(queries, first_keys)
        parts = [scores + causal_bias(slots, slots, scores, lag=step)]
        chain_values = []
        for index in range(1, step + 1):
            shift = step - index
            chain_keys, chain_value = (
                functional.pad(part, (0, 0, shift, 0))[:, :, None, :slots] for part in earlier[index]
            )
            parts.append((queries * chain_keys).sum(-1, keepdim=True))
            chain_values.append(chain_value)
        weights = torch.cat(parts, -1)
        weights = weights.softmax(-1, dtype=weights.dtype)
        mixed = mix_values(weights[..., :slots], first_values)
        for index, chain_value in enumerate(chain_values):
            mixed = mixed + weights[..., slots + index, None] * chain_value
        states = layer.finish(states, mixed)
        yield draft.logits(states)
        states = functional.pad(states, (0, 0, 1, 0))[:, :-1]


@torch.no_grad()
def initialise(draft: EagleDraft, target: Llama, lesson: Lesson) -> None:
    """Start near the target: pass its last captured states through, and copy its norm and output head."""
    for name, weight in draft.named_parameters():
        if weight.dim() > 1:
            shrink = 0.5 if "o_proj" in name or "down_proj" in name else 1.0
            nn.init.normal_(weight, std=shrink * weight.shape[1] ** -0.5)
    size, layers = draft.shape.hidden_size, len(draft.captured_layers)
    scale = lesson.captured[:64].float().unflatten(-1, (layers, size)).pow(2).mean((0, 1, 3)).sqrt()
    draft.fc.weight.mul_(0.3 / scale.repeat_interleave(size))
    draft.fc.weight[:, -size:] += torch.eye(size) / scale[-1]
    draft.lm_head.weight.copy_(target.lm_head.weight)
    draft.norm.weight.copy_(target.model.norm.weight)


def shuffled_batches(count: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless random covers of the sequences."""
    while True:
        order = torch.randperm(count, generator=generator)
        for start in range(0, count - batch + 1, batch):
            yield order[start : start + batch]


def train(target: Llama, draft: EagleDraft, lesson: Lesson, recipe: Recipe, prompts: Tensor, out: Path) -> None:
    """Fit the draft to the target's sharpened predictions, at every step of the training-time test."""
    matrices = [weight for weight in draft.parameters() if weight.dim() > 1]
    vectors = [weight for weight in draft.parameters() if weight.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(SEED + 2)
    batches = shuffled_batches(len(lesson.ids), recipe.batch, generator)
    slots = lesson.ids.shape[1] - 2
    rotation = target.rotation(0, slots)
    live = torch.stack([torch.arange(slots) >= step for step in range(recipe.unrolled_steps)]).float()
    # Slot i proposes x[i+2]; prompts are not the target's own words, so they count less.
    weight_of_slot = torch.where(torch.arange(slots) + 2 >= PROMPT_TOKENS, 1.0, 0.3)
    running = None
    began = time.time()
    for step in range(1, recipe.optimizer_steps + 1):
        remaining = (recipe.optimizer_steps - step + 1) / (0.75 * recipe.optimizer_steps)
        rate = recipe.learning_rate * min(1.0, step / 60) * max(0.02, min(1.0, remaining))
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = next(batches)
        losses = []
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                teacher = target.lm_head(lesson.final[rows, 1:]).float()
                wanted = (teacher / recipe.teacher_temperature).softmax(-1)
                embeddings = target.model.embed_tokens(lesson.ids[rows, 1:-1])
            unrolled = unroll(draft, embeddings, lesson.captured[rows, :-1], rotation, recipe.unrolled_steps)
            for depth, logits in enumerate(unrolled):
                surprise = -(wanted * logits.float().log_softmax(-1)).sum(-1)
                weight = (weight_of_slot * live[depth]).expand_as(surprise)
                losses.append((surprise * weight).sum() / weight.sum())
        loss = sum(recipe.step_decay**depth * part for depth, part in enumerate(losses))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        current = torch.stack(losses).detach()
        running = current if running is None else 0.95 * running + 0.05 * current
        if step % recipe.log_every == 0 or step <= 5:
            shown = " ".join(f"{part:.6f}" for part in running.tolist())
            print(f"step {step} losses {shown} after {time.time() - began:.0f} s", flush=True)
        if step % recipe.check_every == 0 or step == recipe.optimizer_steps:
            save_draft(draft, out)
            served, target_ids = load_draft(out, target)
            print(f"step {step} held out: {measure(target, served, target_ids, prompts)}", flush=True)


def main() -> None:
    """Write the lesson, then train and save the draft."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts_heldout.jsonl")
    parser.add_argument("--out", type=Path, default=HERE / "draft")
    parser.add_argument("--steps", type=int, default=Recipe.optimizer_steps)
    parser.add_argument("--written-batches", type=int, default=Recipe.written_batches)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED + 1)
    recipe = Recipe(optimizer_steps=options.steps, written_batches=options.written_batches)
    target = load_target(options.target)
    depth = target.shape.num_hidden_layers
    captured_layers = (2, depth // 2, depth - 2)
    training_ids = encode_topics(load_tokenizer(options.target), load_topics()[0])
    writer = torch.Generator().manual_seed(SEED + 1)
    lesson = write_lesson(target, captured_layers, training_ids, recipe.written_batches, writer)
    shape = type(target.shape)(**{**vars(target.shape), "intermediate_size": recipe.intermediate_size})
    draft = EagleDraft(shape, captured_layers)
    initialise(draft, target, lesson)
    prompts = read_prompts(options.prompts, 64, PROMPT_TOKENS)
    train(target, draft, lesson, recipe, prompts, options.out)


if __name__ == "__main__":
    main()
