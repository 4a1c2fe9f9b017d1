"""Token counts by distribution: "64", "uniform:16,128" or "lognormal:64,0.5"."""

from __future__ import annotations

import contextlib
import math
import random
from dataclasses import dataclass
from typing import Literal

KINDS = '"64" (fixed), "uniform:16,128" (least, most) or "lognormal:64,0.5" (median, sigma)'
MOST_TOKENS = 1_000_000
MOST_SIGMA = 3.0
CUT_AT_MEDIANS = 10  # where a log-normal's tail is cut: one far draw would be a load of its own


@dataclass(frozen=True)
class Lengths:
    """A distribution of tokens per request. `first`, `second`: tokens; least, most; median, sigma of the logarithm."""

    text: str
    kind: Literal["fixed", "uniform", "lognormal"]
    first: float
    second: float

    def draw(self, count: int, seed: str) -> list[int]:
        """`count` lengths, each 1 or more; the same seed gives the same ones."""
        chance = random.Random(seed)
        return [self._one(chance) for _ in range(count)]

    def _one(self, chance: random.Random) -> int:
        if self.kind == "fixed":
            return int(self.first)
        if self.kind == "uniform":
            return chance.randint(int(self.first), int(self.second))
        drawn = min(chance.lognormvariate(math.log(self.first), self.second), CUT_AT_MEDIANS * self.first)
        return max(1, round(drawn))


def parse_lengths(name: str, text: str) -> Lengths:
    """The distribution that a text names. Raises ValueError, one line with `name`, for any other text."""
    kind, _, numbers = text.rpartition(":")
    with contextlib.suppress(ValueError):  # no number, too many or too few: the same words say what would be right
        first, *rest = (float(part) for part in numbers.split(","))
        if kind == "" and not rest and _is_count(first):
            return Lengths(text, "fixed", first, first)
        (second,) = rest
        if kind == "uniform" and _is_count(first) and _is_count(second) and first <= second:
            return Lengths(text, "uniform", first, second)
        if kind == "lognormal" and 1 <= first <= MOST_TOKENS and 0 < second <= MOST_SIGMA:
            return Lengths(text, "lognormal", first, second)
    limits = f"1 to {MOST_TOKENS} tokens, sigma above 0 and up to {MOST_SIGMA:g}"
    raise ValueError(f"{name} must be {KINDS}, with {limits}; got {text!r}")


def _is_count(number: float) -> bool:
    return number.is_integer() and 1 <= number <= MOST_TOKENS
