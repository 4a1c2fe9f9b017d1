"""Rows: schema, invariants, atomic files, tables."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pydantic import ValidationError

from specdec.runs.results import (
    Cell,
    describe_columns,
    machine,
    read_cells,
    read_results,
    write_atomic,
    write_cell,
    write_tables,
)

GOOD: dict[str, Any] = {
    **{"run_id": "r", "cell_id": "v1-dynamic4-c008-r0", "started_at": "2026-01-01T00:00:00+00:00"},
    **{
        "profile": "cpu-tiny",
        "arm": "dynamic",
        "worker": "v1",
        "threshold": 4,
        "concurrency": 8,
        "repeat": 0,
    },
    **{"order": 1, "num_prompts": 16, "output_tokens_per_request": 64, "prompt_set": "p.jsonl"},
    **{"prompt_set_sha256": "0" * 64, "machine": "a CPU", "output_tokens": 1024, "duration_s": 2.0},
    **{"output_tok_s": 512.0, "achieved_batch_mean": 7.5, "achieved_batch_peak": 8, "overlap": False},
}


def cell(**changes: Any) -> Cell:
    return Cell(**GOOD | changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"output_tokens": 1023}, "output tokens 1023, asked 1024"),
        ({"output_tokens": None}, "output tokens None, asked 1024"),
        ({"output_tok_s": None}, "no duration or no throughput"),
        ({"achieved_batch_mean": 8.5}, "mean batch 8.5 above its peak 8"),
        ({"achieved_batch_peak": 9}, "peak batch 9 above the concurrency 8"),
        ({"ttft_ms_p50": 2.0, "ttft_ms_p99": 1.0}, "ttft_ms percentiles fall"),
        ({"worker": "none", "arm": "baseline"}, "a baseline with a threshold"),
    ],
)
def test_a_row_is_right_or_has_an_error(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        cell(**changes)
    assert cell(**changes, error=reason).error == reason


@pytest.mark.parametrize(
    "changes",
    [
        {"schema_version": 2},
        {"unknown_column": 1},
        {"arm": "sometimes"},
        {"cell_id": "../elsewhere"},
        {"concurrency": 0},
        {"plain_step_share": 1.1},
        {"duration_s": float("nan")},
        {"accept_length": 0.5},
    ],
)
def test_rows_outside_the_schema_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        cell(**changes)


def test_written_rows_come_back(tmp_path: Path) -> None:
    first, second = cell(), cell(cell_id="other", started_at="2026-01-01T00:00:01+00:00", error="died")
    write_cell(tmp_path, second)
    write_cell(tmp_path, first)
    assert read_cells(tmp_path) == [first, second]
    frame = read_results(tmp_path)
    assert list(frame.columns) == list(Cell.model_fields)
    assert frame["threshold"].tolist() == [4, 4]
    assert frame["error"].isna().tolist() == [True, False]


def test_missing_is_missing_and_columns_keep_their_type(tmp_path: Path) -> None:
    write_cell(tmp_path, cell(threshold=None, arm="static"))
    frame = read_results(tmp_path)
    assert frame["threshold"].isna().all()
    assert frame["ttft_ms_p50"].isna().all()
    kinds = {name: str(frame[name].dtype) for name in ("threshold", "ttft_ms_p50", "overlap", "worker_class")}
    assert kinds == {
        "threshold": "Int64",
        "ttft_ms_p50": "float64",
        "overlap": "boolean",
        "worker_class": "string",
    }


def test_tables_hold_the_same_rows(tmp_path: Path) -> None:
    rows = [cell(), cell(cell_id="other", threshold=None, arm="static", error="died")]
    written = write_tables(tmp_path, rows)
    pd.testing.assert_frame_equal(read_results(tmp_path), written)  # no cells/: from the table
    csv = pd.read_csv(tmp_path / "results.csv")
    assert csv["cell_id"].tolist() == ["v1-dynamic4-c008-r0", "other"]
    assert csv["threshold"].isna().tolist() == [False, True]


def test_a_table_of_another_schema_is_refused(tmp_path: Path) -> None:
    frame = write_tables(tmp_path, [cell()])
    frame.assign(concurrency=0).to_parquet(tmp_path / "results.parquet", index=False)
    with pytest.raises(ValueError, match="does not fit the schema"):
        read_results(tmp_path)


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no results"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b'{"run_id": "r", "cell', b"\x00" * 40, b"[]", b'{"hello": 1}', b"PK\x03\x04\xff\xfe"]
)
def test_torn_and_alien_files_are_set_aside_with_one_line(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    write_cell(tmp_path, cell())
    torn = tmp_path / "cells" / "torn.json"
    torn.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert [row.cell_id for row in read_cells(tmp_path)] == ["v1-dynamic4-c008-r0"]
    assert len(caplog.records) == 1
    assert "\n" not in caplog.text.strip()
    assert not torn.exists()
    assert (tmp_path / "cells" / "torn.json.set-aside").read_bytes() == content
    assert len(read_cells(tmp_path)) == 1  # and once only


def test_reading_results_changes_nothing(tmp_path: Path) -> None:
    write_cell(tmp_path, cell())
    torn = tmp_path / "cells" / "torn.json"
    torn.write_bytes(b"{")
    assert len(read_results(tmp_path)) == 1
    assert torn.read_bytes() == b"{"


def test_a_row_under_another_name_is_set_aside(tmp_path: Path) -> None:
    path = write_cell(tmp_path, cell())
    path.rename(path.with_name("copy.json"))
    assert read_cells(tmp_path) == []


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if failing == "fsync" else (Path, "replace")), full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_every_column_is_described() -> None:
    columns = describe_columns()
    assert columns["column"].tolist() == list(Cell.model_fields)
    assert columns["meaning"].str.len().min() > 10
    assert columns.set_index("column").loc["threshold", "type"] == "int"
    assert columns.set_index("column").loc["arm", "type"] == "str"


def test_machine_names_cores() -> None:
    assert f"{len(os.sched_getaffinity(0))} cores" in machine()
