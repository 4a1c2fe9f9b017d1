"""What an open loop gave: rates asked and sent, and latencies, queueing included."""

from __future__ import annotations

import pandas as pd
from pydantic import BaseModel, ConfigDict

from specdec.load.bench import RequestTimes
from specdec.load.cell import Slo, summarize
from specdec.load.shapes import OpenLoad
from specdec.servers.counters import STATE_COLUMNS


class OpenLoopFacts(BaseModel):
    """Over the requests that were answered. Times count from when a request was due, sent late or not.

    So a slow client makes them worse, never better; `send_lag_ms_max` says by how much.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schedule_s: float
    requested_requests_per_s: float | None  # of the schedule; None: all due at once
    sent_requests_per_s: float | None  # the same requests over the time that sending them took
    send_lag_ms_max: float
    duration_s: float  # from the first request due to the last answer
    requests_per_s: float  # answered
    output_tok_s: float
    goodput_requests_per_s: float | None  # answered within the SLO; None without one
    ttft_ms_p50: float | None
    ttft_ms_p90: float | None
    ttft_ms_p99: float | None
    tpot_ms_p50: float | None
    tpot_ms_p90: float | None
    tpot_ms_p99: float | None
    e2e_ms_p50: float
    e2e_ms_p90: float
    e2e_ms_p99: float


def open_loop_facts(load: OpenLoad, requests: pd.DataFrame, slo: Slo) -> OpenLoopFacts:
    """Sum up the requests of an open loop (`request_stream.Ramp`), at least one of them answered."""
    lag_s = requests["start_s"] - requests["due_s"]
    sending_s = load.duration_s + float(lag_s[requests["due_s"] == load.due_s[-1]].max())
    done = [_times(row) for _, row in requests[requests["error"].isna()].iterrows()]
    tokens = sum(request.output_tokens for request in done)
    # Each request's tokens were held against what was asked already, and of the server's counters a failed
    # request can have taken a part.
    measured = summarize(done, 0, tokens, tokens, slo, **dict.fromkeys(STATE_COLUMNS))
    return OpenLoopFacts(
        schedule_s=load.duration_s,
        requested_requests_per_s=load.requests_per_s,
        sent_requests_per_s=len(requests) / sending_s if load.duration_s else None,
        send_lag_ms_max=1000 * float(lag_s.max()),
        **{name: getattr(measured, name) for name in OpenLoopFacts.model_fields if hasattr(measured, name)},
    )


def _times(row: pd.Series) -> RequestTimes:  # type: ignore[type-arg]
    later_tokens = row["output_tokens"] - row["first_tokens"]
    return RequestTimes(
        start_s=row["due_s"],
        ttft_s=row["first_token_s"] - row["due_s"],
        tpot_s=(row["last_token_s"] - row["first_token_s"]) / later_tokens if later_tokens else None,
        e2e_s=row["end_s"] - row["due_s"],
        output_tokens=row["output_tokens"],
    )
