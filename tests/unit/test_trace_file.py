"""Trace files: both formats, order, lengths, and files that cannot be replayed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from specdec.load.trace_file import TracedRequest, read_trace_file

REQUESTS = (TracedRequest(100.0, 374, 44), TracedRequest(100.25, 396, 109), TracedRequest(101.0, 879, 55))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_json_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        '{"timestamp": 100, "input_tokens": 374, "output_tokens": 44, "hash_ids": [1, 2]}\n\n'
        '{"output_tokens": 109, "timestamp": 100.25, "input_tokens": 396}\n'
        '{"timestamp": 101.0, "input_tokens": 879, "output_tokens": 55}\n',
    )
    trace = read_trace_file(path)
    assert trace.requests == REQUESTS
    assert trace.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_csv(tmp_path: Path) -> None:
    text = "timestamp,model,output_tokens,input_tokens\n100,m,44,374\n100.25,m,109,396\n101,m,55,879\n"
    assert read_trace_file(write(tmp_path / "trace.csv", text)).requests == REQUESTS


def test_dates_with_time_are_seconds(tmp_path: Path) -> None:
    text = (
        "timestamp,input_tokens,output_tokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace_file(write(tmp_path / "trace.csv", text)).requests
    assert second.timestamp_s - first.timestamp_s == pytest.approx(4.314579, abs=1e-5)


GOOD = '{"timestamp": 5, "input_tokens": 1, "output_tokens": 1}\n'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("no json", "line 2: no JSON; a line has timestamp, input_tokens, output_tokens"),
        ("[1, 2, 3]", "line 2: a request has timestamp, input_tokens, output_tokens"),
        ('{"timestamp": 6, "input_tokens": 1}', "line 2: a request has"),
        ('{"timestamp": 6, "input_tokens": 0, "output_tokens": 1}', "input_tokens must be an integer of 1 or more"),
        ('{"timestamp": 6, "input_tokens": 1, "output_tokens": 1.5}', "output_tokens must be an integer of 1"),
        ('{"timestamp": 6, "input_tokens": true, "output_tokens": 1}', "input_tokens must be an integer of 1"),
        ('{"timestamp": 6, "input_tokens": "x", "output_tokens": 1}', "got 'x'"),
        ('{"timestamp": "soon", "input_tokens": 1, "output_tokens": 1}', "timestamp must be seconds, or a date"),
        ('{"timestamp": NaN, "input_tokens": 1, "output_tokens": 1}', "timestamp must be seconds, or a date"),
        ('{"timestamp": [6], "input_tokens": 1, "output_tokens": 1}', "timestamp must be seconds, or a date"),
        ('{"timestamp": 4.9, "input_tokens": 1, "output_tokens": 1}', "before that of the line above; sort the file"),
        ('{"timestamp": 3600000, "input_tokens": 1, "output_tokens": 1}', "lasts 1000 hours, at most 24 can be"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(line: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bad\.jsonl") as error:
        read_trace_file(write(tmp_path / "bad.jsonl", GOOD + line + "\n"))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_csv_without_a_column_and_with_a_bad_value(tmp_path: Path) -> None:
    azure = "TIMESTAMP,ContextTokens,output_tokens\n1,2,3\n"
    with pytest.raises(ValueError, match=r"columns timestamp, .*; missing: timestamp, input_tokens"):
        read_trace_file(write(tmp_path / "a.csv", azure))
    with pytest.raises(ValueError, match=r"a\.csv line 3: output_tokens must be an integer of 1 or more, got ''"):
        read_trace_file(write(tmp_path / "a.csv", "timestamp,input_tokens,output_tokens\n1,2,3\n2,2,\n"))
    with pytest.raises(ValueError, match=r"a\.csv line 2: a request has"):
        read_trace_file(write(tmp_path / "a.csv", "timestamp,input_tokens,output_tokens\n1,2\n"))


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trace file .*nope\.jsonl: No such file"):
        read_trace_file(tmp_path / "nope.jsonl")
    with pytest.raises(ValueError, match="holds no request"):
        read_trace_file(write(tmp_path / "empty.jsonl", "\n"))
    with pytest.raises(ValueError, match="missing: timestamp, input_tokens, output_tokens"):
        read_trace_file(write(tmp_path / "empty.csv", ""))
