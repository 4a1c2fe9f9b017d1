"""Notebooks 00 to 04 for real on a small grid: one `specdec run` on real servers, read by all tests here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import psutil
import pytest

from specdec.notebooks import NOTEBOOKS, check_executed
from specdec.runs.load_ramp import read_ramps
from specdec.runs.plan import make_plan
from specdec.runs.results import read_results
from specdec.runs.step_cost import read_step_costs
from specdec.worker_path import installed_release

pytestmark = pytest.mark.sglang
# Each server takes half a minute to start: those of the first release that other tests of sweeps use are left out.
WORKERS = {"0.5.12": ["v1"], "0.5.23": ["v2", "v2-tree"]}[installed_release()]
GRID = ["--workers", ",".join(WORKERS), "--concurrency", "1,4", "--thresholds", "2", "--repeats", "1"]
PLAN = make_plan(sglang=installed_release(), workers=WORKERS, concurrencies=[1, 4], thresholds=[2], repeats=1)
KINDS = {  # (arm, has a threshold)
    "0.5.12": {("baseline", False), ("static", False), ("dynamic", True)},
    "0.5.23": {("baseline", False), ("static", False), ("dynamic", True), ("adaptive", True), ("adaptive", False)},
}[PLAN.sglang]
LIMIT_S = 2700  # 10 minutes on a quiet machine


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run folder, and what the command said."""
    out = tmp_path_factory.mktemp("small") / "run"
    command = [str(Path(sys.executable).with_name("specdec")), "run", *GRID, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out, done.stdout


@pytest.fixture(scope="module")
def results(run: tuple[Path, str]) -> pd.DataFrame:
    return read_results(run[0])


def test_every_arm_is_measured_on_the_worker_it_names(results: pd.DataFrame) -> None:
    assert results["error"].isna().all(), results["error"].dropna().tolist()
    thresholds = results["threshold"].astype(object).where(results["threshold"].notna(), None)
    arms = list(zip(results["arm"], results["worker"], thresholds, strict=True))
    planned = [(arm.arm, arm.worker, arm.threshold) for arm in PLAN.arms()]
    assert set(arms) == set(planned)
    assert len(arms) == len(planned) * len(PLAN.concurrencies)
    assert {(arm, threshold is not None) for arm, _, threshold in arms} == KINDS
    classes = {"none": None, "v1": "EAGLEWorker", "v2": "EAGLEWorkerV2", "v2-tree": "EAGLEWorkerV2"}
    for worker, found in results.groupby("worker")["worker_class"]:
        assert found.dropna().unique().tolist() == [name for name in [classes[worker]] if name]


def test_the_switch_acted_above_its_threshold_only(results: pd.DataFrame) -> None:
    dynamic = results[results["arm"] == "dynamic"]
    above = dynamic[dynamic["concurrency"] > dynamic["threshold"]]
    below = dynamic[dynamic["concurrency"] <= dynamic["threshold"]]
    assert (above["plain_steps"] > 0).all()
    assert (below["plain_steps"] == 0).all()


def test_the_ramp_switched_off_and_on_again(run: tuple[Path, str]) -> None:
    ramps = read_ramps(run[0])
    assert [ramp.facts.worker for ramp in ramps] == list(PLAN.workers)
    for ramp in ramps:
        assert ramp.facts.switches_off >= 1
        assert ramp.facts.switches_on >= 1
        assert ramp.facts.failed_requests == 0
        plain = ramp.trace["mode"] == "plain"
        assert (ramp.trace.loc[plain, "batch_size"] > 2).all()
        assert (ramp.trace.loc[~plain, "batch_size"] <= 2).all()


def test_steps_of_every_server_and_mode_have_their_cost(run: tuple[Path, str]) -> None:
    baseline, *workers = read_step_costs(run[0])
    assert [(cost.batch_size, cost.mode) for cost in baseline.costs] == [(1, "baseline"), (4, "baseline")]
    assert [one.worker for one in workers] == list(PLAN.workers)
    for one in workers:
        kinds = [(batch, mode) for batch in (1, 4) for mode in ("speculative", "plain")]
        assert [(cost.batch_size, cost.mode) for cost in one.costs] == kinds
        for cost in one.costs:
            assert (cost.accept_length > 1) == (cost.mode == "speculative")
            assert cost.verify is not None
            assert cost.verify.p50_ms > 0


def test_every_notebook_is_there_and_complete(run: tuple[Path, str]) -> None:
    for name in NOTEBOOKS:
        (path,) = (run[0] / "notebooks").glob(f"{name}*.ipynb")
        check_executed(nbformat.read(path, as_version=4), name)


def test_the_second_notebook_measured_nothing_anew(run: tuple[Path, str]) -> None:
    (path,) = (run[0] / "notebooks").glob("02_*.ipynb")
    notebook = nbformat.read(path, as_version=4)
    outputs = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    cells = len(PLAN.arms()) * len(PLAN.concurrencies)
    assert f"{cells}/{cells}" in outputs


def test_figures_and_page_lie_in_the_folder(run: tuple[Path, str]) -> None:
    names = {path.name for path in (run[0] / "figures").iterdir()}
    figures = ["throughput", "accept_length", "envelope", "gain_map", "latency_throughput", "step_cost"]
    figures += [f"{name}-{w}" for name in ("ramp", "accept_length_around_switches") for w in PLAN.workers]
    assert names == {f"{name}.{kind}" for name in figures for kind in ("png", "svg")}
    assert (run[0] / "report.html").stat().st_size > 100_000


def test_the_terminal_said_where_it_was(run: tuple[Path, str]) -> None:
    for number, name in enumerate(NOTEBOOKS, 1):
        assert f"notebook {number} of 5: {name}" in run[1]
    assert "report: " in run[1]


def test_no_server_is_left(run: tuple[Path, str]) -> None:
    """A server holds its log in the run folder open."""
    left = [
        process.info
        for process in psutil.process_iter(["pid", "name", "open_files"])
        if any(file.path.startswith(str(run[0])) for file in process.info["open_files"] or [])
    ]
    assert left == []
