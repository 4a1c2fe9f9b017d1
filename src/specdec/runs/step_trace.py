"""The step trace a server writes when SPECDEC_TRACE names a file: one JSON line per decode step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

TRACE_VARIABLE = "SPECDEC_TRACE"
COLUMNS = {
    "step": "int64",  # decode step of the server, from its start
    "t_s": "float64",  # its start, s since the server's start
    "batch_size": "int64",  # requests in the step
    "mode": "str",  # "speculative" | "plain"; missing on a server without the switch
    "tokens": "int64",  # committed in the step, over all its requests
    "duration_us": "int64",  # host time of the batch's run
}
LIVE = "requests"  # those of the batch not finished yet
STAGES = ("draft", "verify", "draft_extend")
STAGE_COLUMNS = {stage: f"{stage}_us" for stage in STAGES}  # their share of duration_us, host time


def read_trace(path: str | Path, begin: int = 0) -> pd.DataFrame:
    """The steps of a trace file from byte `begin` on, in order; an unfinished last line is left out.

    The columns `requests` and those of the stages are kept where the server writes them (a baseline has no
    stages). Raises ValueError if another line is no step.
    """
    with Path(path).open("rb") as file:
        file.seek(begin)
        lines = file.read().split(b"\n")[:-1]
    try:
        steps = pd.DataFrame([json.loads(line) for line in lines])
        more = [name for name in (LIVE, *STAGE_COLUMNS.values()) if name in steps]
        return steps.reindex(columns=[*COLUMNS, *more]).astype(COLUMNS)
    except ValueError as error:
        raise ValueError(f"{path} is no step trace: {error}") from None


def around_switches(trace: pd.DataFrame, steps: int = 20) -> pd.DataFrame:
    """Accept length of up to `steps` speculative steps before each switch off and after each switch on.

    Columns: side ("before off" | "after on"), switch (its number, from 0), step (-1 = the last one before,
    0 = the first one after), accept_length (tokens / requests, the mean over the step's requests).

    With overlap, a request that has just finished is in one more step, which commits nothing for it. Such
    steps are left out. Where the trace does not say how many requests were live, the batch size stands for
    them: then a step in which only some had finished counts too low.
    """
    live = trace[LIVE] if LIVE in trace else trace["batch_size"]
    trace = trace[(trace["mode"] != "speculative") | (trace["tokens"] > 0)]
    live = live.loc[trace.index]
    speculative = (trace["mode"] == "speculative").to_numpy()
    accepted = (trace["tokens"] / live).to_numpy(dtype=float)
    changes = np.flatnonzero(np.diff(speculative.astype(int))) + 1
    runs = list(zip([0, *changes], [*changes, len(trace)], strict=True))
    rows: list[tuple[str, int, int, float]] = []
    for number, (begin, end) in enumerate(runs):
        if not speculative[begin]:
            continue
        if number > 0:
            after = accepted[begin : min(end, begin + steps)]
            rows += [("after on", number // 2, i, value) for i, value in enumerate(after)]
        if number < len(runs) - 1:
            before = accepted[max(begin, end - steps) : end]
            rows += [("before off", number // 2, i - len(before), value) for i, value in enumerate(before)]
    return pd.DataFrame(rows, columns=["side", "switch", "step", "accept_length"])
