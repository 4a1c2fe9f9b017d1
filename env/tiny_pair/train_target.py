"""Train the tokenizer and the target, a deep and narrow Llama, from nothing.

Training stops after a few epochs, near the best held-out loss. A target that has memorised its text
surprises a small draft with recited detail; one that has learned the language of the text writes what a draft
can follow.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from corpus import SEED, build_tokenizer, encode_topics, load_topics, write_prompts
from model import Llama, LlamaShape, load_target, save_weights
from torch import Tensor
from torch.nn import functional

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Recipe:
    """Lengths of the target's training."""

    shallow_layers: int = 6
    shallow_steps: int = 700
    optimizer_steps: int = 1050
    batch: int = 8
    window: int = 128
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    log_every: int = 50
    check_every: int = 250


def shuffled_windows(ids: Tensor, recipe: Recipe, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless covers of the text by windows, each cover shuffled and shifted anew."""
    width = recipe.window + 1
    while True:
        offset = int(torch.randint(0, recipe.window, (1,), generator=generator))
        starts = torch.arange(offset, len(ids) - width, recipe.window)
        starts = starts[torch.randperm(len(starts), generator=generator)]
        for first in range(0, len(starts) - recipe.batch + 1, recipe.batch):
            rows = starts[first : first + recipe.batch, None] + torch.arange(width)
            yield ids[rows]


def loss_and_accuracy(target: Llama, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy and share of right guesses of the next token."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = target.lm_head(target(rows[:, :-1])[0]).float()
    wanted = rows[:, 1:]
    return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()), (
        logits.argmax(-1) == wanted
    ).float().mean()


@torch.no_grad()
def check(target: Llama, ids: Tensor, window: int) -> tuple[float, float]:
    """Loss and accuracy on evenly spaced windows."""
    starts = torch.linspace(0, len(ids) - window - 2, 48).long()
    loss, accuracy = loss_and_accuracy(target, ids[starts[:, None] + torch.arange(window + 1)])
    return round(loss.item(), 4), round(accuracy.item(), 4)


def make_optimizer(target: Llama, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW that decays matrices only."""
    matrices = [weight for weight in target.parameters() if weight.dim() > 1]
    vectors = [weight for weight in target.parameters() if weight.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)


def train(shape: LlamaShape, training_ids: Tensor, held_out_ids: Tensor, recipe: Recipe) -> Llama:
    """Train a shallow model first, then grow it to its full depth and train on."""
    target = Llama(replace(shape, num_hidden_layers=recipe.shallow_layers))
    optimizer = make_optimizer(target, recipe)
    windows = shuffled_windows(training_ids, recipe, torch.Generator().manual_seed(SEED))
    began, grown_at = time.time(), 0
    for step in range(1, recipe.optimizer_steps + 1):
        if step == recipe.shallow_steps + 1:
            target = target.grown(shape.num_hidden_layers)
            optimizer, grown_at = make_optimizer(target, recipe), step - 1
        remaining = (recipe.optimizer_steps - step + 1) / (0.6 * recipe.optimizer_steps)
        rate = recipe.learning_rate * min(1.0, (step - grown_at) / 60) * max(0.02, min(1.0, remaining))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, _ = loss_and_accuracy(target, next(windows))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % recipe.log_every == 0 or step <= 5:
            print(f"step {step} loss {loss.item():.6f} after {time.time() - began:.0f} s", flush=True)
        if step % recipe.check_every == 0:
            print(
                f"step {step} held-out loss, accuracy: {check(target, held_out_ids, recipe.window)}",
                flush=True,
            )
    return target


def main() -> None:
    """Build tokenizer, target and held-out prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "target")
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts_heldout.jsonl")
    parser.add_argument("--steps", type=int, default=Recipe.optimizer_steps)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    recipe = Recipe(optimizer_steps=options.steps)
    training, held_out = load_topics()
    tokenizer = build_tokenizer(training, options.out)
    training_ids, held_out_ids = encode_topics(tokenizer, training), encode_topics(tokenizer, held_out)
    print(f"training text {len(training_ids)} tokens, held out {len(held_out_ids)} tokens", flush=True)
    write_prompts(tokenizer, held_out_ids, options.prompts)
    target = train(LlamaShape(), training_ids, held_out_ids, recipe)
    save_weights(target.state_dict(), target.shape.to_config("LlamaForCausalLM"), options.out)
    served = load_target(options.out)
    print(f"rounded, training text: {check(served, training_ids, recipe.window)}")
    print(f"rounded, held out: {check(served, held_out_ids, recipe.window)}")


if __name__ == "__main__":
    main()
