"""Open loops: requests are sent at given times, whether earlier ones are answered or not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from specdec.load.loop_thread import DEFAULT_STALL_S
from specdec.load.request_stream import SAMPLE_S, Ramp, Request, RequestStream
from specdec.servers.server import Server


def open_loop(
    server: Server,
    arrivals: Iterable[tuple[float, Request]],
    sample_s: float | None = SAMPLE_S,
    stall_s: float = DEFAULT_STALL_S,
) -> Ramp:
    """Send each request when it is due (s since the start, in order); all are answered in the end.

    Nothing waits for an answer. A request sent late, because this client was busy, has a start_s after its
    due_s. A failed request is a row with its error. Raises CellError if no token comes for `stall_s` with
    requests in flight, ServerDied if the server ends.
    """
    stream = RequestStream(server, stall_s)

    async def send() -> None:
        answers = []
        for due_s, request in arrivals:
            await asyncio.sleep(max(0.0, due_s - stream.now_s()))
            answers.append(stream.begin(stream.answer(request, due_s)))
        await asyncio.gather(*answers)

    return stream.run(send, sample_s)
