"""The text the tiny pair is trained on, its held-out part, and the tokenizer.

The text is ``pydoc_data.topics``: the language reference that every CPython carries. It needs no download,
and both models learn real prose from it. It differs between Python releases, so a rebuild checks its hash.
"""

import hashlib
import json
import re
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 20240
VOCAB_SIZE = 512
BOS_ID = 0
EOS_ID = 1
PROMPT_COUNT = 64
PROMPT_TOKENS = 48
CORPUS_SHA256 = "c3591dfe9e80b9699a432f2b5ffa1e87335aac86f33703e5aa652b097c62c3fb"

# Neither model ever sees these topics in training. Listed by name so that no seed can move the split.
HELD_OUT_TOPICS = (
    "attribute-access",
    "augassign",
    "class",
    "dict",
    "exceptions",
    "for",
    "global",
    "id-classes",
    "in",
    "naming",
    "raise",
    "try",
)
# Topics quote each other: a training paragraph that shares a run of this many words with them is dropped.
SHARED_WORDS = 8


def simplify(text: str) -> str:
    """Cut rulers to four signs and the padding inside tables to two spaces.

    A small model cannot count signs: at temperature 0 it would draw a ruler without end.
    """
    text = re.sub(r"([^\w\s])\1{4,}", r"\1\1\1\1", text)
    return re.sub(r"(?<=\S) {3,}(?=\S)", "  ", text)


def _word_runs(text: str) -> set[tuple[str, ...]]:
    """All runs of SHARED_WORDS words (all words of a shorter text), blind to line breaks and indents."""
    words = text.split()
    last_start = max(1, len(words) - SHARED_WORDS + 1)
    return {tuple(words[start : start + SHARED_WORDS]) for start in range(last_start)}


def load_topics(check_hash: bool = True) -> tuple[list[str], list[str]]:
    """The training texts, quotes of held-out text removed, and the held-out texts; one string a topic."""
    from pydoc_data.topics import topics

    found = hashlib.sha256(json.dumps(sorted(topics.items())).encode()).hexdigest()
    if check_hash and found != CORPUS_SHA256:
        raise RuntimeError("pydoc_data.topics differs from the one the pair was made from: use CPython 3.11.7")
    held_out = [simplify(topics[name]) for name in HELD_OUT_TOPICS]
    held_out_runs = set().union(*(_word_runs(paragraph) for text in held_out for paragraph in text.split("\n\n")))
    training = []
    for name in sorted(set(topics) - set(HELD_OUT_TOPICS)):
        paragraphs = simplify(topics[name]).split("\n\n")
        # A short common line ("See also:") may stay: it says nothing about the held-out text.
        kept = [part for part in paragraphs if len(part.strip()) <= 40 or not _word_runs(part) & held_out_runs]
        training.append("\n\n".join(kept))
    return training, held_out


def build_tokenizer(texts: list[str], folder: Path) -> Tokenizer:
    """Train a byte-level BPE on the training texts and save it the way transformers loads it.

    The vocabulary is small on purpose: most words split into several tokens, and the tail of a word is what
    even a one-layer draft predicts well.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    return tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer that ``build_tokenizer`` saved."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode_topics(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """All texts as one row of token ids, with an end-of-sequence token before each."""
    ids: list[int] = []
    for text in texts:
        ids.append(EOS_ID)
        ids.extend(tokenizer.encode(text).ids)
    return torch.tensor(ids, dtype=torch.long)


def write_prompts(tokenizer: Tokenizer, held_out_ids: torch.Tensor, path: Path) -> None:
    """Write evenly spaced windows of the held-out text, one JSON object a line."""
    starts = torch.linspace(0, len(held_out_ids) - PROMPT_TOKENS - 1, PROMPT_COUNT).long().tolist()
    with path.open("w") as lines:
        for start in starts:
            ids = held_out_ids[start : start + PROMPT_TOKENS].tolist()
            lines.write(json.dumps({"ids": ids, "text": tokenizer.decode(ids)}) + "\n")


def read_prompts(path: Path, count: int, tokens: int) -> torch.Tensor:
    """The first ``tokens`` ids of ``count`` prompts, as a matrix."""
    rows = [json.loads(line)["ids"][:tokens] for line in path.read_text().splitlines()]
    return torch.tensor(rows[:count])
