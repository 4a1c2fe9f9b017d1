"""Prompt files: what is sent to a model, and how it is recorded."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Prompt = str | tuple[int, ...]  # a text, tokenized by the server, or token ids, sent as they are


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one file, in its order."""

    name: str
    sha256: str
    prompts: tuple[Prompt, ...]

    def pick(self, count: int, seed: str) -> list[Prompt]:
        """`count` prompts in an order given by `seed` alone; each is taken once before any is taken again."""
        order = list(self.prompts)
        random.Random(seed).shuffle(order)
        return [order[i % len(order)] for i in range(count)]


def read_prompts(path: str | Path) -> PromptSet:
    """Read JSON lines, each with "text" or "prompt", "ids", or "conversations" (ShareGPT: its first turn).

    One JSON array of such objects, as ShareGPT is published, is read too; its conversations without a turn
    are left out. A text wins over ids, which fit one tokenizer only. Raises ValueError that names the line.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"prompt file {path}: {error.strerror}") from None
    is_array = content.lstrip().startswith(b"[")
    text = content.decode(errors="replace")
    prompts: list[Prompt] = []
    for where, record in _array_records(path, text) if is_array else _lines(text):
        try:
            prompts.append(_prompt_of(json.loads(record) if isinstance(record, str) else record))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            wanted = '"text", "prompt", "ids" or "conversations"'
            raise ValueError(f"{path} {where}: no prompt; a line is JSON with {wanted}") from None
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return PromptSet(path.name, hashlib.sha256(content).hexdigest(), tuple(prompts))


def cut_prompts(tokens: Sequence[int], lengths: Iterable[int]) -> Iterator[Prompt]:
    """Prompts of exactly these lengths: pieces of a running text that follow each other, over again at its end.

    `tokens`: the text as token ids, not empty.
    """
    text = itertools.cycle(tokens)
    for length in lengths:
        yield tuple(itertools.islice(text, length))


def _lines(text: str) -> Iterator[tuple[str, str]]:
    return ((f"line {number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip())


def _array_records(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        records = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} begins as a JSON array and is none: {error}") from None
    for number, record in enumerate(records, 1):
        if not (isinstance(record, dict) and record.get("conversations") == []):
            yield f"entry {number}", record


def _prompt_of(record: dict[str, Any]) -> Prompt:
    text = record.get("text") or record.get("prompt")
    if text is None and "conversations" in record:
        first = record["conversations"][0]
        text = first.get("value") or first["content"]
    if text is not None:
        if not isinstance(text, str):
            raise TypeError("the prompt is no string")
        return text
    return tuple(int(token) for token in record["ids"])
