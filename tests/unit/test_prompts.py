"""Prompt files beside JSON lines (tests/unit/test_cell.py has those), and prompts of a given length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.load.prompts import cut_prompts, read_prompts


def test_a_sharegpt_array_is_read_without_its_empty_conversations(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    first = {"id": "a", "conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "no"}]}
    file.write_text(json.dumps([first, {"id": "b", "conversations": []}, {"prompt": "p"}], indent=2))
    prompts = read_prompts(file)
    assert prompts.prompts == ("hello", "p")
    assert len(prompts.sha256) == 64


def test_an_entry_without_a_prompt_is_named(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    file.write_text('[{"prompt": "p"},\n{"answer": "a"}]')
    with pytest.raises(ValueError, match=r"sharegpt\.json entry 2: no prompt"):
        read_prompts(file)
    file.write_text('[{"prompt": "p"},')
    with pytest.raises(ValueError, match=r"begins as a JSON array and is none") as error:
        read_prompts(file)
    assert "\n" not in str(error.value)


def test_prompts_of_given_lengths_follow_each_other_in_the_text() -> None:
    assert list(cut_prompts(range(10), [4, 1, 7, 3])) == [  # type: ignore[arg-type]
        (0, 1, 2, 3),
        (4,),
        (5, 6, 7, 8, 9, 0, 1),
        (2, 3, 4),
    ]
