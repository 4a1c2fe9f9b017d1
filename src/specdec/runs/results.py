"""One row per measured cell: its schema, its file, its tables, and where it came from.

A run folder holds `cells/<cell_id>.json` (the truth, one file per cell, written atomically) and
`results.parquet` and `results.csv` (the same rows as tables, written anew from the cells). Missing is null,
never 0.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import tempfile
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import pandas as pd
import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

CELLS_FOLDER = "cells"
_log = logging.getLogger(__name__)


class Cell(BaseModel):
    """One measured cell: one arm at one concurrency in one block.

    A row without `error` satisfies the invariants of `broken_invariants`; a row with `error` may hold any
    part of the numbers. The descriptions below are the documentation of the columns (`describe_columns`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: Literal[1] = Field(1, description="Version of this schema.")
    run_id: str = Field(description="Identity of the run; kept when the run is resumed.")
    cell_id: str = Field(
        pattern=r"^[a-z0-9-]+$",
        description="Identity of the cell within the run: arm, concurrency and repeat.",
    )
    started_at: str = Field(description="When the cell began, UTC, ISO 8601.")

    # What was asked for
    profile: str = Field(description="Name of the profile (model, machine, flags).")
    arm: Literal["baseline", "static", "dynamic", "off", "adaptive"] = Field(
        description="baseline: a server without speculation. static: always speculates. dynamic: speculates "
        "up to `threshold`. off: threshold 0, never speculates. adaptive: SGLang 0.5.23's own switch, with tiers "
        "that switch at `threshold`, or its default tiers (null)."
    )
    worker: str = Field(
        description="Worker of the profile: v1 (EAGLEWorker), v2 (EAGLEWorkerV2), v2-tree (the same with topk > 1); "
        "none for the baseline."
    )
    threshold: int | None = Field(
        ge=0, description="Largest batch size that still speculates, as the server reports it; null = always."
    )
    resume_threshold: int | None = Field(
        None,
        ge=0,
        description="Speculation comes back at this batch size or below, as the server reports it.",
    )
    dwell_steps: int | None = Field(
        None, ge=1, description="Decode steps a mode is kept at least, as the server reports it."
    )
    concurrency: int = Field(ge=1, description="Requests the client keeps in flight.")
    repeat: int = Field(ge=0, description="Which repeat, from 0. Cells of one repeat and concurrency form a block.")
    order: int = Field(ge=0, description="Position in which the arm was measured inside its block, from 0.")
    num_prompts: int = Field(ge=1, description="Requests of the cell.")
    output_tokens_per_request: int = Field(ge=1, description="Output tokens asked for per request, EOS ignored.")
    prompt_set: str = Field(description="Name of the prompt file.")
    prompt_set_sha256: str = Field(description="SHA-256 of the prompt file.")
    slo_ttft_ms: float | None = Field(None, gt=0, description="Goodput: largest time to first token allowed, ms.")
    slo_tpot_ms: float | None = Field(None, gt=0, description="Goodput: largest time per output token allowed, ms.")

    # What ran, as the server says
    sglang: str | None = Field(None, description="SGLang release of the server.")
    worker_class: str | None = Field(None, description="Class of the speculative worker; null for the baseline.")
    worker_file: str | None = Field(None, description="File of that class, relative to site-packages.")
    overlap: bool | None = Field(None, description="Whether the overlap scheduler is on.")
    topk: int | None = Field(None, ge=1, description="speculative_eagle_topk of the server.")
    num_steps: int | None = Field(None, ge=0, description="speculative_num_steps of the server.")
    num_draft_tokens: int | None = Field(None, ge=1, description="speculative_num_draft_tokens of the server.")
    server_flags: str | None = Field(
        None, description="The server's command, paths relative to the repository where they can be."
    )
    model: str | None = Field(None, description="Target model.")
    draft_model: str | None = Field(None, description="Draft model; null for the baseline.")

    # Throughput
    duration_s: float | None = Field(
        None, gt=0, description="First request sent to last request answered, s, on the client's clock."
    )
    input_tokens: int | None = Field(None, ge=0, description="Prompt tokens, the server's count.")
    output_tokens: int | None = Field(None, ge=0, description="Generated tokens, the server's count.")
    output_tok_s: float | None = Field(None, ge=0, description="output_tokens / duration_s, tokens/s.")
    total_tok_s: float | None = Field(None, ge=0, description="(input_tokens + output_tokens) / duration_s, tokens/s.")
    requests_per_s: float | None = Field(None, ge=0, description="num_prompts / duration_s, requests/s.")
    goodput_requests_per_s: float | None = Field(
        None, ge=0, description="Requests within both SLOs / duration_s, requests/s; null if no SLO is given."
    )

    # Latency, over the requests of the cell
    ttft_ms_p50: float | None = Field(None, ge=0, description="Request sent to first token received, ms, median.")
    ttft_ms_p90: float | None = Field(None, ge=0, description="The same, 90th percentile.")
    ttft_ms_p99: float | None = Field(None, ge=0, description="The same, 99th percentile.")
    tpot_ms_p50: float | None = Field(
        None,
        ge=0,
        description="Time per output token of a request, ms, median over requests: (last token - first "
        "token) / (tokens - 1); / (tokens - k) where the first chunk holds k tokens.",
    )
    tpot_ms_p90: float | None = Field(None, ge=0, description="The same, 90th percentile.")
    tpot_ms_p99: float | None = Field(None, ge=0, description="The same, 99th percentile.")
    e2e_ms_p50: float | None = Field(None, ge=0, description="Request sent to answer complete, ms, median.")
    e2e_ms_p90: float | None = Field(None, ge=0, description="The same, 90th percentile.")
    e2e_ms_p99: float | None = Field(None, ge=0, description="The same, 99th percentile.")

    # What the server did during the cell (null on a server without the plugin)
    achieved_batch_mean: float | None = Field(None, ge=1, description="Mean batch size over the decode steps.")
    achieved_batch_peak: int | None = Field(None, ge=1, description="Largest batch size of a decode step.")
    accept_length: float | None = Field(
        None,
        ge=1,
        description="Tokens committed per speculative step and request, bonus token included; plain steps "
        "not counted; null without a speculative step.",
    )
    speculative_steps: int | None = Field(None, ge=0, description="Decode steps that drafted and verified.")
    plain_steps: int | None = Field(
        None, ge=0, description="Decode steps of a speculative server that gave one token per request."
    )
    plain_step_share: float | None = Field(
        None,
        ge=0,
        le=1,
        description="plain_steps / (speculative_steps + plain_steps); null for the baseline.",
    )
    switches_off: int | None = Field(None, ge=0, description="Times speculation was switched off.")
    switches_on: int | None = Field(None, ge=0, description="Times speculation was switched on again.")

    # What went wrong
    server_restarts: int = Field(
        0,
        ge=0,
        description="Times this cell's server had to be started again after a failure, so far in the run.",
    )
    error: str | None = Field(None, description="Why the cell failed, one line; null = it did not.")
    error_log_tail: str | None = Field(None, description="Last lines of the server's log when the cell failed.")

    # Where
    machine: str = Field(description="CPU model and cores, GPUs.")
    git_commit: str | None = Field(
        None, description="Commit of this package's source, '-dirty' if changed; null outside a checkout."
    )

    @model_validator(mode="after")
    def _right_or_an_error(self) -> Cell:
        if self.error is None and (broken := broken_invariants(self)):
            raise ValueError("; ".join(broken))
        return self


def broken_invariants(cell: Cell) -> list[str]:
    """What cannot be true of a cell that was measured right, one line each."""
    broken = []
    asked = cell.num_prompts * cell.output_tokens_per_request
    if cell.output_tokens != asked:
        broken.append(f"output tokens {cell.output_tokens}, asked {asked}")
    if cell.duration_s is None or cell.output_tok_s is None:
        broken.append("no duration or no throughput")
    mean, peak = cell.achieved_batch_mean, cell.achieved_batch_peak
    if mean is not None and peak is not None and mean > peak:
        broken.append(f"mean batch {mean:g} above its peak {peak}")
    if peak is not None and peak > cell.concurrency:
        broken.append(f"peak batch {peak} above the concurrency {cell.concurrency}")
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        percentiles = [getattr(cell, f"{name}_{p}") for p in ("p50", "p90", "p99")]
        known = [value for value in percentiles if value is not None]
        if known != sorted(known):
            broken.append(f"{name} percentiles fall: {known}")
    if cell.worker == "none" and (cell.threshold is not None or cell.accept_length is not None):
        broken.append("a baseline with a threshold or an accept length")
    return broken


# Files


def write_atomic(path: Path, content: bytes) -> None:
    """Write `path` whole or not at all, whatever ends this process or machine.

    By a tmp file beside it, fsync, rename, and fsync of the folder.

    Raises OSError (disk full, no permission); the tmp file is gone then and an older `path` is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, tmp_name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    tmp = Path(tmp_name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        tmp.chmod(0o644)  # mkstemp makes it private
        tmp.replace(path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_cell(out: str | Path, cell: Cell) -> Path:
    """Write one row to `out`/cells/<cell_id>.json, atomically."""
    path = Path(out) / CELLS_FOLDER / f"{cell.cell_id}.json"
    write_atomic(path, (cell.model_dump_json(indent=1) + "\n").encode())
    return path


def read_cells(out: str | Path, set_aside: bool = True) -> list[Cell]:
    """The valid rows of `out`/cells, by start time.

    A torn file, one of another schema or under another cell's name is left out and named in one warning line;
    with `set_aside` it is renamed to *.set-aside (where the folder can be written), and a run measures that
    cell anew.
    """
    cells = []
    for path in sorted((Path(out) / CELLS_FOLDER).glob("*.json")):
        try:
            cell = Cell.model_validate_json(path.read_bytes())
            if cell.cell_id != path.stem:
                raise ValueError(f"holds the cell {cell.cell_id}")
        except ValueError as error:
            _warn_of(path, error)
            if set_aside:
                with contextlib.suppress(OSError):  # read-only folder: it is left out all the same
                    path.replace(path.with_name(path.name + ".set-aside"))
        else:
            cells.append(cell)
    return sorted(cells, key=lambda cell: (cell.started_at, cell.cell_id))


def _warn_of(path: Path, error: ValueError) -> None:
    reason = str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        reason = f"{'.'.join(str(part) for part in first['loc']) or 'file'}: {first['msg']}"
    _log.warning("%s is no valid cell (%s); left out", path, reason)


def read_results(out: str | Path) -> pd.DataFrame:
    """The rows of a run folder as a typed table, one column per field of Cell.

    From its cells, or from results.parquet where only that was kept (results/reference). Raises ValueError in
    one line if the folder holds neither or the table does not fit the schema.
    """
    out = Path(out)
    if (out / CELLS_FOLDER).is_dir():
        return to_frame(read_cells(out, set_aside=False))  # whoever looks at a run changes nothing in it
    table = out / "results.parquet"
    if not table.is_file():
        raise ValueError(f"{out} holds no results: neither {CELLS_FOLDER}/ nor results.parquet")
    frame = pd.read_parquet(table)
    try:
        rows = json.loads(frame.to_json(orient="records"))
        return to_frame([Cell.model_validate(row) for row in rows])
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{table} does not fit the schema: {first['loc']}: {first['msg']}") from None


def write_tables(out: str | Path, cells: Iterable[Cell]) -> pd.DataFrame:
    """Write results.parquet and results.csv of `cells`, each atomically; returns the table."""
    frame = to_frame(cells)
    out = Path(out)
    write_atomic(out / "results.parquet", frame.to_parquet(index=False))
    write_atomic(out / "results.csv", frame.to_csv(index=False).encode())
    return frame


def to_frame(cells: Iterable[Cell]) -> pd.DataFrame:
    """One row per cell in the order given; columns typed by the schema even if all values are missing."""
    rows = [cell.model_dump() for cell in cells]
    columns = {
        name: pd.array([row[name] for row in rows], dtype=_dtype(name))  # type: ignore[call-overload]
        for name in Cell.model_fields
    }
    return pd.DataFrame(columns)


def _dtype(column: str) -> str:
    """pandas' type for a column: nullable, except float, where NaN is the missing value that plots know."""
    kind = _value_type(column)
    return {int: "Int64", float: "float64", bool: "boolean"}.get(kind, "string")


def _value_type(column: str) -> type:
    annotation = typing.get_type_hints(Cell)[column]
    if isinstance(annotation, types.UnionType):
        annotation = next(part for part in typing.get_args(annotation) if part is not type(None))
    if typing.get_origin(annotation) is Literal:
        annotation = type(typing.get_args(annotation)[0])
    assert isinstance(annotation, type)
    return annotation


def describe_columns() -> pd.DataFrame:
    """The schema as a table: column, type, may be missing, meaning."""
    hints = typing.get_type_hints(Cell)
    return pd.DataFrame(
        [
            (name, _value_type(name).__name__, type(None) in typing.get_args(hints[name]), field.description)
            for name, field in Cell.model_fields.items()
        ],
        columns=["column", "type", "may be missing", "meaning"],
    )


# Provenance


def machine() -> str:
    """CPU model and cores this process may use, memory, and GPUs where nvidia-smi answers."""
    model = "unknown CPU"
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    memory_gib = psutil.virtual_memory().total / 2**30
    parts = [f"{model}, {len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB"]
    gpus = _first_output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()
    parts += [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    return "; ".join(parts)


def git_commit() -> str | None:
    """Commit of the checkout this runs from, "-dirty" if tracked files differ; None outside a checkout."""
    here = str(Path(__file__).parent)
    commit = _first_output(["git", "-C", here, "rev-parse", "HEAD"]).strip()
    if not commit:
        return None
    changed = _first_output(["git", "-C", here, "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}-dirty" if changed.strip() else commit


def _first_output(command: list[str]) -> str:
    """Standard output of a command; empty if it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
