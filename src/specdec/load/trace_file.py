"""Trace files: when requests came and how long they were, to be replayed.

JSON lines with "timestamp", "input_tokens" and "output_tokens", or CSV (.csv) with columns of these names; others
are ignored. A timestamp is a number of seconds, or a date with time ("2023-11-16 18:17:03.9799600").
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

FIELDS = ("timestamp", "input_tokens", "output_tokens")
LONGEST_S = 24 * 3600.0  # more is a trace in milliseconds


@dataclass(frozen=True)
class TracedRequest:
    """One request of a trace; its timestamp in s, from whenever the trace counts."""

    timestamp_s: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class TraceFile:
    """The requests of a trace in their order, and the file's SHA-256."""

    requests: tuple[TracedRequest, ...]
    sha256: str


def read_trace_file(path: Path) -> TraceFile:
    """Read a trace. Raises ValueError, one line that names file and line, for one that cannot be replayed."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"trace file {path}: {error.strerror}") from None
    lines = content.decode(errors="replace").splitlines()
    requests: list[TracedRequest] = []
    for number, record in _csv_records(path, lines) if path.suffix == ".csv" else _json_records(path, lines):
        requests.append(_request(f"{path} line {number}", record))
        if len(requests) > 1 and requests[-1].timestamp_s < requests[-2].timestamp_s:
            raise ValueError(f"{path} line {number}: its timestamp is before that of the line above; sort the file")
    if not requests:
        raise ValueError(f"{path} holds no request")
    if (lasts_s := requests[-1].timestamp_s - requests[0].timestamp_s) > LONGEST_S:
        raise ValueError(
            f"{path} lasts {lasts_s / 3600:.0f} hours, at most {LONGEST_S / 3600:.0f} can be replayed; "
            "timestamps are in seconds (milliseconds: divide them by 1000)"
        )
    return TraceFile(tuple(requests), hashlib.sha256(content).hexdigest())


def _csv_records(path: Path, lines: list[str]) -> Iterator[tuple[int, Any]]:
    reader = csv.DictReader(lines)
    if missing := [name for name in FIELDS if name not in (reader.fieldnames or ())]:
        raise ValueError(f"{path}: a trace has the columns {', '.join(FIELDS)}; missing: {', '.join(missing)}")
    for record in reader:
        yield reader.line_num, record


def _json_records(path: Path, lines: list[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except ValueError:
            raise ValueError(f"{path} line {number}: no JSON; a line has {', '.join(FIELDS)}") from None


def _request(where: str, record: Any) -> TracedRequest:
    if not isinstance(record, dict) or any(record.get(name) is None for name in FIELDS):
        raise ValueError(f"{where}: a request has {', '.join(FIELDS)}")
    return TracedRequest(
        _seconds(where, record["timestamp"]),
        *(_tokens(where, name, record[name]) for name in ("input_tokens", "output_tokens")),
    )


def _seconds(where: str, value: Any) -> float:
    with contextlib.suppress(TypeError, ValueError):
        seconds = pd.Timestamp(value).timestamp() if _is_date(value) else float(value)
        if math.isfinite(seconds):
            return float(seconds)
    raise ValueError(f"{where}: timestamp must be seconds, or a date with time, got {value!r}")


def _is_date(value: Any) -> bool:
    return isinstance(value, str) and ":" in value


def _tokens(where: str, name: str, value: Any) -> int:
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(value, (bool, float)) and int(value) >= 1:
            return int(value)
    raise ValueError(f"{where}: {name} must be an integer of 1 or more, got {value!r}")
