"""Step costs: which steps count, what is kept, and the figure, on traces whose right answer is known."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
from matplotlib.container import BarContainer
from step_costs import costs as example_costs

from specdec.figures.step_cost import step_cost_figure
from specdec.figures.style import figure_data
from specdec.load.closed_loop import Phase
from specdec.load.loop_thread import CellError
from specdec.runs import step_cost
from specdec.runs.plan import SweepPlan, make_plan
from specdec.runs.step_cost import (
    batches_up_to,
    cost_of,
    full_steps,
    measure_step_costs,
    ms_per_token,
    read_step_costs,
    step_cost_table,
)
from specdec.runs.step_trace import read_trace

STEPS_A_WAVE = 9  # of the full batch: four waves give 30


def line(step: int, t_s: float, batch: int, mode: str | None, tokens: int = 0, **more: int) -> dict[str, Any]:
    row = {"step": step, "t_s": t_s, "batch_size": batch, "mode": mode, "requests": batch}
    return row | {"tokens": tokens or batch, "duration_us": 9000} | more


@dataclass
class FakeServer:
    """Writes the trace of a wave: as many full steps as asked, then two of a smaller batch."""

    trace: Path
    worker: str
    most: ClassVar[int] = 1000  # requests it admits at once
    threshold: int | None = None
    waves: list[tuple[str, int, str | None]] = field(default_factory=list)  # of all servers
    step: int = 0
    t_s: float = 0.0

    def set_threshold(self, threshold: int | None) -> None:
        assert self.worker != "none", "a baseline has no threshold"
        self.threshold = threshold

    def state(self) -> dict[str, Any]:
        return {"worker_class": None if self.worker == "none" else "EAGLEWorker"}

    def wave(self, requests: int) -> None:
        mode = None if self.worker == "none" else "plain" if self.threshold == 0 else "speculative"
        self.waves.append((self.worker, requests, mode))
        batch = min(requests, self.most)
        with self.trace.open("a") as file:
            for size in [batch] * STEPS_A_WAVE + [batch - 1] * 2:
                file.write(json.dumps(self._line(size, mode)) + "\n")
        self.t_s += 60.0  # between two waves

    def _line(self, size: int, mode: str | None) -> dict[str, Any]:
        spent = {"draft_us": 1000, "verify_us": 5000, "draft_extend_us": 500} if mode else {}
        row = line(self.step, self.t_s, size, mode, tokens=3 * size if mode == "speculative" else size, **spent)
        self.step += 1
        self.t_s += 0.020 if mode == "speculative" else 0.010
        return row


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, FakeServer]:
    """Every server that was started, by worker; waves go into their traces."""
    started: dict[str, FakeServer] = {}
    waves: list[tuple[str, int, str | None]] = []

    @contextlib.contextmanager
    def traced(plan: SweepPlan, worker: str, out: Path) -> Iterator[tuple[FakeServer, Path]]:
        trace = tmp_path / f"{worker}.jsonl"
        trace.touch()
        started[worker] = FakeServer(trace, worker, waves=waves)
        yield started[worker], trace

    def send(server: FakeServer, phases: Sequence[Phase], requests: Sequence[Any], sample_s: None) -> Any:
        (phase,) = phases
        assert len(requests) == phase.concurrency
        server.wave(phase.concurrency)
        return type("Sent", (), {"requests": pd.DataFrame({"error": [None] * phase.concurrency})})

    monkeypatch.setattr(step_cost, "traced_server", traced)
    monkeypatch.setattr(step_cost, "warm_up", lambda *_: None)
    monkeypatch.setattr(step_cost, "ramp", send)
    return started


@pytest.fixture
def plan() -> SweepPlan:
    return make_plan("cpu-tiny", sglang="0.5.12", workers=["v1", "v2"])


def quiet(**_: Any) -> Any:
    return contextlib.nullcontext(type("Bar", (), {"update": staticmethod(lambda _: None)}))


def test_a_trace_has_its_stages_and_a_baseline_no_mode(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(line(1, 0.5, 2, "plain", draft_us=7, verify_us=8, draft_extend_us=9)) + "\n")
    assert read_trace(path)[["draft_us", "verify_us", "draft_extend_us"]].iloc[0].tolist() == [7, 8, 9]
    path.write_text(json.dumps(line(1, 0.5, 2, None)) + "\n")
    baseline = read_trace(path)
    assert baseline["mode"].isna().all()
    assert "draft_us" not in baseline


def test_only_steps_followed_by_one_of_their_kind_count(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    kinds = [(3, "plain"), (4, "plain"), (4, "speculative"), (4, "speculative"), (4, "speculative"), (3, "speculative")]
    rows = [line(number, 0.01 * number, batch, mode) for number, (batch, mode) in enumerate(kinds)]
    rows += [line(10, 9.0, 4, "speculative"), line(12, 9.5, 4, "speculative")]  # step 11 was not a decode step here
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = full_steps(read_trace(path), 4, "speculative")
    assert steps["step"].tolist() == [2, 3]
    assert steps["total_us"].tolist() == pytest.approx([10_000, 10_000])
    assert full_steps(read_trace(path), 4, "plain").empty


def test_a_cost_is_made_of_medians_and_the_rest_of_each_step() -> None:
    stages = {"draft_us": 1000, "verify_us": 5000, "draft_extend_us": 500}
    rows = [line(i, 0.0, 2, "speculative", tokens=5, **stages) | {"total_us": 10_000.0 + 1000 * i} for i in range(5)]
    rows[4]["requests"] = 1  # one of the two had finished before
    rows[4]["tokens"] = 2
    cost = cost_of(pd.DataFrame(rows), 2, "speculative")
    assert (cost.steps, cost.forward) == (5, None)
    assert cost.total == step_cost.Spread(p25_ms=11.0, p50_ms=12.0, p75_ms=13.0)
    assert cost.rest.p50_ms == 5.5
    assert cost.accept_length == pytest.approx(22 / 9)
    assert ms_per_token(cost) == pytest.approx(12 / (22 / 9))
    baseline = cost_of(pd.DataFrame(rows), 2, "baseline")
    assert baseline.draft is baseline.verify is baseline.draft_extend is None
    assert baseline.forward is not None
    assert (baseline.forward.p50_ms, baseline.rest.p50_ms) == (9.0, 3.0)


def test_servers_take_turns_until_each_has_enough_steps(
    servers: dict[str, FakeServer], plan: SweepPlan, tmp_path: Path
) -> None:
    found = measure_step_costs(plan, tmp_path / "run", [1, 8], quiet)
    assert [one.worker for one in found] == ["none", "v1", "v2"]
    assert [(cost.batch_size, cost.mode) for cost in found[0].costs] == [(1, "baseline"), (8, "baseline")]
    kinds = [(1, "speculative"), (1, "plain"), (8, "speculative"), (8, "plain")]
    assert [(cost.batch_size, cost.mode) for cost in found[1].costs] == kinds
    assert {cost.steps for one in found for cost in one.costs} == {4 * (STEPS_A_WAVE - 1)}
    speculative, plain = found[2].costs[:2]
    assert (speculative.total.p50_ms, speculative.accept_length) == (pytest.approx(20.0), 3.0)
    assert (plain.total.p75_ms, plain.accept_length) == (pytest.approx(10.0), 1.0)  # no gap between two waves in it
    workers = [(worker, 1, mode) for worker in ("v1", "v2") for mode in ("speculative", "plain")]
    assert servers["v1"].waves[:20] == [("none", 1, None), *workers] * 4
    assert (found[1].topk, found[1].num_draft_tokens, found[0].topk) == (4, 16, None)
    assert read_step_costs(tmp_path / "run") == found


def test_long_waves_are_repeated_all_the_same(
    servers: dict[str, FakeServer], plan: SweepPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.STEPS_A_WAVE", 64)
    found = measure_step_costs(plan, tmp_path / "run", [1], quiet)
    assert {cost.steps for one in found for cost in one.costs} == {3 * 63}


def test_servers_that_do_not_fit_side_by_side_follow_each_other(
    servers: dict[str, FakeServer], plan: SweepPlan, tmp_path: Path
) -> None:
    alone = plan.model_copy(update={"profile": plan.profile.model_copy(update={"side_by_side": False})})
    assert len(measure_step_costs(alone, tmp_path / "run", [1], quiet)) == 3
    order = [worker for worker, _, _ in servers["v1"].waves]
    assert order == ["none"] * 4 + ["v1"] * 8 + ["v2"] * 8


def test_a_batch_that_the_server_does_not_admit_is_left_out(
    servers: dict[str, FakeServer],
    plan: SweepPlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(FakeServer, "most", 4)
    found = measure_step_costs(plan, tmp_path / "run", [1, 8], quiet)
    assert [(cost.batch_size, cost.mode) for cost in found[1].costs] == [(1, "speculative"), (1, "plain")]
    assert "worker v1: 8 requests of 64 tokens sent at once gave no two plain steps of batch size 8" in caplog.text
    assert [wave for wave in servers["v1"].waves if wave == ("v1", 8, "plain")] == [("v1", 8, "plain")]
    tick_texts = [tick.get_text() for tick in step_cost_figure(found).axes[2].get_xticklabels()]
    assert tick_texts == ["spec.", "plain\n1", "base"]


def test_what_is_there_is_not_measured_again(
    servers: dict[str, FakeServer], plan: SweepPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measure_step_costs(plan, tmp_path, [8, 1], quiet)
    servers.clear()
    assert measure_step_costs(plan, tmp_path, [1, 8], quiet) == found
    assert not servers
    (tmp_path / "step_cost" / "v2.json").write_text("{")
    assert measure_step_costs(plan, tmp_path, [1, 8], quiet)[2].worker == "v2"
    assert list(servers) == ["v2"]
    measure_step_costs(plan, tmp_path, [1], quiet)
    assert list(servers) == ["v2", "none", "v1"]


def test_batches_end_at_the_peak() -> None:
    assert [batches_up_to(peak) for peak in (1, 4, 32, 64)] == [(1,), (1, 4), (1, 8, 32), (1, 8, 32, 64)]


def test_a_failed_request_ends_it(
    servers: dict[str, FakeServer], plan: SweepPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = type("Sent", (), {"requests": pd.DataFrame({"error": ["HTTP 500: out of memory"]})})
    monkeypatch.setattr(step_cost, "ramp", lambda *_, **__: sent)
    with pytest.raises(CellError, match="worker none, batch size 1: HTTP 500: out of memory"):
        measure_step_costs(plan, tmp_path / "run", [1], quiet)


@pytest.mark.parametrize("batches", [[], [0, 1], [8, 8]])
def test_batches_that_cannot_be_measured_are_refused_before_a_start(
    batches: list[int], servers: dict[str, FakeServer], plan: SweepPlan, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="batches must be different integers of 1 or more"):
        measure_step_costs(plan, tmp_path, batches, quiet)
    assert not servers


def test_a_folder_without_costs_has_none_and_a_torn_file_is_named(tmp_path: Path) -> None:
    assert read_step_costs(tmp_path) == []
    assert "Not measured in this run" in figure_data(step_cost_figure([]))
    assert step_cost_table([]).columns.tolist()[:3] == ["worker", "batch size", "step"]
    (tmp_path / "step_cost").mkdir()
    (tmp_path / "step_cost" / "v1.json").write_text("{")
    with pytest.raises(ValueError, match=r"v1\.json: "):
        read_step_costs(tmp_path)


def test_the_table_has_a_row_per_bar() -> None:
    table = step_cost_table(example_costs()).set_index(["worker", "batch size", "step"])
    assert len(table) == 3 * (1 + 2 + 2)
    row = table.loc[("v1", 8, "speculative")]
    assert float(row["total ms"]) / row["accept length"] == pytest.approx(row["ms per token and request"], abs=0.02)
    assert table.loc[("none", 8, "baseline"), ["verify ms", "forward ms"]].tolist() == ["-", "23.2"]


def test_bars_add_up_to_the_median_step_beside_the_baselines() -> None:
    figure = step_cost_figure(example_costs())
    top, _, bottom, _ = figure.axes
    bars = [container for container in top.containers if isinstance(container, BarContainer)]
    names = ["draft", "verify", "draft extend", "baseline's forward", "rest (sampling, scheduling)"]
    assert [container.get_label() for container in bars] == names
    (v1,) = [one for one in example_costs() if one.worker == "v1"]
    (baseline,) = [one for one in example_costs() if one.worker == "none"]
    shown = [*v1.costs, *baseline.costs]
    heights = [sum(container[i].get_height() for container in bars) for i in range(len(shown))]
    assert heights == pytest.approx([cost.total.p50_ms for cost in shown])
    assert [bar.get_height() for bar in bottom.containers[0]] == pytest.approx([ms_per_token(c) for c in shown])
    assert [text.get_text() for text in top.texts][:2] == ["43.5", "23.3"]
    assert [tick.get_text() for tick in bottom.get_xticklabels()][:4] == ["spec.", "plain\n1", "spec.", "plain\n8"]
    assert top.get_title(loc="left") == "Worker v1: EAGLEWorker, topk 4, 16 draft tokens"
    assert top.get_ylim()[1] > max(cost.total.p75_ms for cost in shown)


def test_the_figure_stands_alone_and_says_its_numbers() -> None:
    text = " ".join(figure_data(step_cost_figure(example_costs())).split())
    for fact in ("n = 31 to 60 steps a bar", "tiny target", "SGLang 0.5.12", "test machine, 2 cores", "medians"):
        assert fact in text
    assert "verify: 33.8, 17.75" in text
    assert "host times" not in text
    on_gpu = [one.model_copy(update={"device": "cuda"}) for one in example_costs()]
    assert "host times: a stage's is that of its launch" in " ".join(step_cost_figure(on_gpu).get_supxlabel().split())
