"""Hand the arms of a sweep to a Ray cluster: one task per server, on as many GPUs as the profile says a server takes.

A task measures the cells of its server in the plan's order, with the code of a sweep on one machine, and sends
each row as soon as it is there. The driver (this process, on a machine of the cluster) alone writes the run's
folder, so the machines need not share it. Each needs this package, of the same commit, and SGLang of the plan's
release in the Python that Ray runs there; a profile's relative paths start at that machine's own checkout. A task
waits until a machine has the GPUs free and holds them until its server has ended.

The arms then run at the same time on different GPUs. The cells of a block are not close in time, their column
`order` is the planned one, and ratios to the baseline of a block hold what differs between machines: let the
machines be equal (column `machine`), and take repeats.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from specdec.load.loop_thread import DEFAULT_STALL_S
from specdec.runs.arm_servers import FAILURES_IN_A_ROW, ArmServers
from specdec.runs.plan import PlannedCell, SweepPlan
from specdec.runs.results import Cell
from specdec.runs.sweep import CellMeasurer, Run, asked_columns, check_inputs, import_bench_meanwhile, open_run

CANCEL_S = 60.0  # a task gets this long to end its server
CONNECT_S = 10.0


@dataclass(frozen=True)
class News:
    """What a task sends: when it begins, where it runs; then each row, with what its servers' logs have gained."""

    machine: str
    row: str | None = None  # a Cell as JSON
    logs: dict[str, bytes] = field(default_factory=dict)  # by file name


@dataclass(frozen=True)
class Ended:
    """A task that sends no more. `error`: why it ended early, one line; `died`: its process or machine did."""

    error: str | None = None
    died: bool = False


@dataclass
class Share:
    """The cells of one server that have no row yet, in the plan's order; one task at a time is at work on them."""

    server: str
    cells: list[PlannedCell]
    machine: str | None = None  # of the task; None: it waits for a place
    restarts: int = 0  # of the server after a failure, over all tasks
    deaths: int = 0  # of tasks since the last row


def run_ray_sweep(
    plan: SweepPlan,
    out: str | Path,
    address: str,
    progress: Callable[..., Any] = tqdm,
    retry_failed: bool = False,
) -> pd.DataFrame:
    """As `run_sweep`, on the Ray cluster at `address` ("auto", or HOST:PORT of its head).

    A task whose process or machine dies costs the cell at work, another task goes on with the rest; one that
    cannot work (no SGLang there, other prompts) costs all its cells. Both are rows with the reason. Raises
    ValueError before anything starts, also if there is no cluster or no machine of it is large enough.
    Ctrl-C cancels the tasks, which end their servers, and keeps the rows.
    """
    if plan.target_ci is not None:
        raise ValueError("--ray goes without --target-ci: each further repeat would start every server again")
    with cluster(address, plan) as tasks, open_run(plan, Path(out), retry_failed) as run:
        _collect(run, tasks, progress)
    return run.table


def _collect(run: Run, tasks: RayTasks, progress: Callable[..., Any]) -> None:
    """Hand out the missing cells and keep each row as it comes."""
    missing = run.missing()
    shares, restarts = split(missing), run.restarts()
    with run.bar(progress, len(missing)) as bar:
        for share in shares:
            share.restarts = restarts[share.server]
            tasks.start(run.run_id, share)
        run.note("running")
        for share, news in tasks.news():
            for row in _rows(run, share, news):
                run.keep(row)
                bar.set_postfix_str(run.last_result, refresh=False)
                bar.update(1)
            share.cells = [cell for cell in share.cells if cell.cell_id not in run.rows]
            if isinstance(news, Ended) and share.cells:
                tasks.start(run.run_id, share)
            at_work = [share.cells[0].cell_id for share in shares if share.machine and share.cells]
            run.current = ", ".join(at_work) or None
            run.note("running")


def split(cells: list[PlannedCell]) -> list[Share]:
    """The cells by server, both in the order in which they come."""
    by_server: dict[str, list[PlannedCell]] = {}
    for cell in cells:
        by_server.setdefault(cell.arm.server, []).append(cell)
    return [Share(server, own) for server, own in by_server.items()]


def _rows(run: Run, share: Share, news: News | Ended) -> list[Cell]:
    """The rows that there are now: the one sent, or failed ones for cells that no task will measure."""
    if isinstance(news, Ended):
        return _lost(run, share, news)
    share.machine = news.machine
    for name, gained in news.logs.items():
        log = run.out / "logs" / name
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as file:
            file.write(gained)
    if news.row is None:
        return []
    row = Cell.model_validate_json(news.row)
    share.deaths, share.restarts = 0, row.server_restarts
    return [row]


def _lost(run: Run, share: Share, ended: Ended) -> list[Cell]:
    """The cells that an early end costs: the one at work; all where another task would end as this one did."""
    share.deaths += 1
    goes_on = ended.died and share.deaths < FAILURES_IN_A_ROW
    columns: dict[str, Any] = {
        "machine": share.machine or "none: not begun",
        "error": ended.error or "its Ray task ended without it",
        "server_restarts": share.restarts,
    }
    lost = share.cells[:1] if goes_on else share.cells
    share.machine = None
    share.restarts += 1
    return [Cell(**asked_columns(run.plan, run.run_id, cell), **columns) for cell in lost]


# The task


def measure_share(
    plan_json: str, run_id: str, cell_ids: list[str], restarts: int, stall_s: float = DEFAULT_STALL_S
) -> Iterator[News]:
    """Measure cells of one server on this machine. Raises ValueError if it is not set up for the plan."""
    plan = SweepPlan.model_validate_json(plan_json)
    prompts = check_inputs(plan)
    planned = {cell.cell_id: cell for repeat in range(plan.repeats) for cell in plan.cells(repeat)}
    if not planned.keys() >= set(cell_ids):
        raise ValueError("its checkout plans other cells than the driver's: both must be of the same commit")
    cells = [planned[cell_id] for cell_id in cell_ids]
    _forget_thread_limit()
    import_bench_meanwhile()
    with tempfile.TemporaryDirectory(prefix="specdec-") as folder:
        servers = ArmServers(plan, Path(folder), prompts, Counter({cells[0].arm.server: restarts}))
        measurer = CellMeasurer(plan, run_id, prompts, servers, stall_s)
        sent: Counter[str] = Counter()
        with contextlib.closing(servers):
            yield News(measurer.machine)
            for cell in cells:
                row = measurer.measure(cell)
                yield News(measurer.machine, row.model_dump_json(), _gained(Path(folder), sent))


def _gained(folder: Path, sent: Counter[str]) -> dict[str, bytes]:
    """What the logs in `folder` hold beyond the bytes `sent`, which are counted up."""
    gained = {}
    for path in folder.glob("*.log"):
        with path.open("rb") as log:
            log.seek(sent[path.name])
            gained[path.name] = log.read()
        sent[path.name] += len(gained[path.name])
    return gained


def _forget_thread_limit() -> None:
    """Take back the OMP_NUM_THREADS that Ray sets for a task: a server's environment is the machine's own.

    What the machine itself sets is in the environment that this process was started with.
    """
    given = Path("/proc/self/environ").read_bytes().split(b"\0")
    if not any(setting.startswith(b"OMP_NUM_THREADS=") for setting in given):
        os.environ.pop("OMP_NUM_THREADS", None)


# Ray


@contextlib.contextmanager
def cluster(address: str, plan: SweepPlan) -> Iterator[RayTasks]:
    """Tasks on a running cluster; at the end those still at work are cancelled, and end their servers.

    Raises ValueError, one line, without Ray here, without a cluster there, or without room for a server.
    """
    try:
        import ray
    except ImportError:
        raise ValueError("--ray needs ray: pip install 'specdec[ray]'") from None
    _check_address(address)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, logging_level="warning")
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = " ".join(str(error).split())  # for two releases of Ray it is spread over lines
        raise ValueError(f"--ray {address}: {reason}") from None
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own would end this process without a word
    tasks = RayTasks(ray, plan)
    try:
        _check_room(ray.nodes(), plan.profile.gpus, address)
        yield tasks
    finally:
        tasks.cancel()
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raise ValueError if this is no address of a running cluster, or nobody listens there: Ray tries for minutes.

    Refused too: "local", which would start a cluster, and "ray://", whose clients get no rows before the end.
    """
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and "/" not in host and port.isdigit()):
        raise ValueError(f"--ray must be auto, or HOST:PORT of the cluster's head, got {address!r}")
    if address == "auto":
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"--ray {address}: no Ray cluster there ({_one_line(error)})") from None


def _check_room(nodes: list[dict[str, Any]], gpus: int, address: str) -> None:
    """Raise ValueError if no machine could ever hold a server: Ray would wait for one without end."""
    largest = max((node["Resources"].get("GPU", 0) for node in nodes if node["Alive"]), default=0)
    if gpus > largest:
        raise ValueError(f"--ray {address}: a server takes {gpus} GPUs, the cluster's largest machine has {largest:g}")


class RayTasks:
    """Ray tasks, each at work on a share, and what they send."""

    def __init__(self, ray: Any, plan: SweepPlan) -> None:
        self._ray = ray
        self._plan = plan
        # No retries by Ray: they would measure again what has been sent.
        self._task = ray.remote(max_retries=0, num_cpus=1, num_gpus=plan.profile.gpus)(_remote_function())
        self._at_work: dict[Any, Share] = {}

    def start(self, run_id: str, share: Share) -> None:
        """Hand out a share's cells; its task begins when a machine has the GPUs free, and holds them to its end."""
        ids = [cell.cell_id for cell in share.cells]
        task = self._task.options(name=f"specdec {share.server}")
        self._at_work[task.remote(self._plan.model_dump_json(), run_id, ids, share.restarts)] = share

    def news(self) -> Iterator[tuple[Share, News | Ended]]:
        """What the tasks send, as it comes, until all have ended."""
        while self._at_work:
            (stream,), _ = self._ray.wait(list(self._at_work), num_returns=1)
            share, news = self._at_work[stream], self._next(stream)
            if isinstance(news, Ended):
                del self._at_work[stream]
            yield share, news

    def cancel(self) -> None:
        """End the tasks still at work, and with them their servers."""
        for stream in self._at_work:
            self._ray.cancel(stream)
        ends = [stream.completed() for stream in self._at_work]
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=CANCEL_S)

    def _next(self, stream: Any) -> News | Ended:
        errors = self._ray.exceptions
        try:
            news: News = self._ray.get(next(stream))
            return news
        except StopIteration:
            return Ended()
        except errors.RayTaskError as error:
            return Ended(f"its Ray task failed {_one_line(error.cause)}")
        except errors.RayError as error:
            return Ended(f"its Ray task died: {_one_line(error)}", died=True)


def _remote_function() -> Callable[..., Iterator[News]]:
    """What Ray runs. Nested, so that Ray sends its code: a machine without this package can then say so."""

    def specdec_sweep(*arguments: Any) -> Iterator[Any]:
        import platform

        try:
            from specdec.runs.ray_sweep import measure_share

            yield from measure_share(*arguments)
        except Exception as error:
            reason = str(error)
            if isinstance(error, ModuleNotFoundError):
                reason = f"no {error.name} in the Python that Ray runs there; it needs specdec[measure] and SGLang"
            raise RuntimeError(f"on {platform.node()}: {reason}") from None

    return specdec_sweep


def _one_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
