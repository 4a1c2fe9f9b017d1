"""Two runs held against each other: right verdicts, few false ones, exit codes, formats."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic import crossing_at, table
from typer.testing import CliRunner

import specdec.runs.results
from specdec.analysis.compare import Comparison, as_json, as_markdown, as_text, compare_runs
from specdec.cli import app

CROSSING = crossing_at(6)


def _cell(a: pd.DataFrame, b: pd.DataFrame, metric: str, arm: str = "static", concurrency: int = 1) -> Comparison:
    report = compare_runs(a, b)
    (found,) = [
        c
        for c in report.comparisons
        if (c.metric, c.arm, c.concurrency) == (metric, arm, concurrency) and c.worker in ("v1", "none")
    ]
    return found


def test_a_rerun_is_called_neither_better_nor_worse() -> None:
    wrong = 0
    for seed in range(0, 40, 2):
        counts = compare_runs(table(CROSSING, seed=seed), table(CROSSING, seed=seed + 1)).counts()
        wrong += counts["better"] + counts["worse"] > 0
    assert wrong <= 4


def test_a_rerun_with_one_noisy_cell_is_called_neither_better_nor_worse() -> None:
    wrong = 0
    for seed in range(0, 40, 2):
        runs = [table(CROSSING, seed=seed + i) for i in (0, 1)]
        rng = np.random.default_rng(seed)
        for run in runs:
            noisy = (run["concurrency"] == 1) & (run["arm"] == "static")
            run.loc[noisy, "output_tok_s"] *= np.exp(rng.normal(0, 0.15, noisy.sum()))
        wrong += compare_runs(*runs).regression
    assert wrong <= 4


def test_a_loss_of_20_percent_is_a_regression() -> None:
    slower = table(lambda c: 0.8 * CROSSING(c), seed=1)
    report = compare_runs(table(CROSSING), slower)
    assert report.exit_code == 1
    worse = {(c.arm, c.concurrency) for c in report.comparisons if c.verdict == "worse"}
    assert {("static", c) for c in (1, 2, 4, 8, 16, 32)} <= worse
    assert ("dynamic 4", 32) not in worse  # plain there: nothing has changed


def test_an_accept_length_of_a_few_steps_is_not_compared() -> None:
    runs = [table(CROSSING, seed=seed) for seed in (0, 1)]
    for run, length in zip(runs, (3.8, 2.0), strict=True):
        hardly = (run["arm"] == "dynamic") & (run["concurrency"] == 32)
        run.loc[hardly, ["accept_length", "speculative_steps"]] = [length, 9]
    assert not compare_runs(*runs).regression


def test_the_arms_of_sglangs_own_switch_are_compared_each_with_its_like() -> None:
    runs = [table(CROSSING, workers=("v2",), adaptive=(4, 8, None), seed=seed) for seed in (0, 1)]
    slow = (runs[1]["arm"] == "adaptive") & (runs[1]["threshold"] == 4)
    runs[1].loc[slow, "output_tok_s"] *= 0.7
    report = compare_runs(*runs)
    adaptive = {c.arm for c in report.comparisons if c.arm.startswith("adaptive")}
    assert adaptive == {"adaptive", "adaptive 4", "adaptive 8"}
    worse = {c.arm for c in report.comparisons if c.verdict == "worse"}
    assert worse == {"adaptive 4"}


def test_a_gain_is_better_and_no_regression() -> None:
    report = compare_runs(table(CROSSING), table(lambda c: 1.3 * CROSSING(c), seed=1))
    assert report.exit_code == 0
    assert report.counts()["better"] > 10


def test_less_latency_is_better_and_more_is_worse() -> None:
    fast = table(CROSSING)
    slow = fast.copy()
    slow.loc[slow["arm"] == "static", "tpot_ms_p50"] *= 1.5
    assert _cell(fast, slow, "tpot_ms_p50").verdict == "worse"
    assert _cell(slow, fast, "tpot_ms_p50").verdict == "better"


def test_a_fallen_accept_length_is_a_regression_on_any_machine() -> None:
    """Case 12: in SGLang #16274 a fall from 2.35 to 1.48 went unnoticed."""
    before = table(CROSSING)
    fallen = before["accept_length"].astype(float) * 1.48 / 2.35
    after = before.assign(accept_length=fallen, machine="another")
    found = _cell(before, after, "accept_length")
    assert found.verdict == "worse"
    assert found.ratio == pytest.approx(1.48 / 2.35)


def test_equal_runs_with_little_noise_are_the_same() -> None:
    report = compare_runs(table(CROSSING, noise=0.003), table(CROSSING, noise=0.003, seed=1))
    assert report.counts()["same"] > 0.8 * len(report.comparisons)


def test_a_sure_change_within_the_margin_is_neither_worse_nor_better() -> None:
    a = table(CROSSING, noise=0.001, repeats=5)
    b = table(lambda c: 0.97 * CROSSING(c), noise=0.001, repeats=5, seed=1)
    assert _cell(a, b, "output_tok_s").verdict == "same"


def test_one_repeat_stays_unclear() -> None:
    found = _cell(table(CROSSING, repeats=1), table(lambda c: 0.5 * CROSSING(c), repeats=1), "output_tok_s")
    assert (found.verdict, found.low, found.high) == ("unclear", None, None)


def test_a_faster_machine_is_no_gain() -> None:
    a, b = table(CROSSING), table(CROSSING, seed=1)
    b = b.assign(machine="twice as fast", output_tok_s=2 * b["output_tok_s"])
    report = compare_runs(a, b)
    assert report.counts()["better"] == 0
    assert not any(c.arm == "baseline" for c in report.comparisons)
    assert any("different machines" in note for note in report.notes)


def test_a_slow_baseline_on_the_same_machine_is_a_regression() -> None:
    a = table(CROSSING, drift=0.02)
    b = table(CROSSING, drift=0.02, seed=1)
    b = b.assign(output_tok_s=0.7 * b["output_tok_s"])
    found = _cell(a, b, "output_tok_s", arm="baseline")
    assert (found.verdict, found.relative_to_baseline) == ("worse", False)


def test_a_cell_that_fails_in_b_is_a_regression() -> None:
    a, b = table(CROSSING), table(CROSSING)
    gone = (b["arm"] == "dynamic") & (b["threshold"] == 4) & (b["concurrency"] == 8) & (b["worker"] == "v1")
    b.loc[gone, ["error", "output_tok_s"]] = ["ServerDied", np.nan]
    report = compare_runs(a, b)
    assert report.failed == ("worker v1, dynamic 4, concurrency 8",)
    assert report.exit_code == 1
    assert "failed in every repeat of B: worker v1, dynamic 4, concurrency 8" in as_text(report)


def test_runs_without_a_common_cell_are_refused() -> None:
    with pytest.raises(ValueError, match="no cell in common"):
        compare_runs(table(CROSSING, concurrencies=[1]), table(CROSSING, concurrencies=[64]))


def test_the_three_formats_hold_every_comparison() -> None:
    report = compare_runs(table(CROSSING), table(CROSSING, seed=1), "before", "after")
    count = len(report.comparisons)
    assert as_markdown(report).count("\n| ") == count + 1
    loaded = json.loads(as_json(report))
    assert len(loaded["comparisons"]) == count
    assert loaded["regression"] is False
    text = as_text(report).splitlines()
    assert text[0].split()[:3] == ["worker", "arm", "concurrency"]
    assert "A = before, B = after" in as_text(report)
    assert sum(line.startswith(("v1", "v2", "none")) for line in text) == count


def test_the_command_ends_with_1_on_a_regression(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = {"a": table(CROSSING), "b": table(lambda c: 0.7 * CROSSING(c), seed=1)}
    monkeypatch.setattr(specdec.runs.results, "read_results", lambda path: runs[path.name])
    invoke = CliRunner().invoke
    assert invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "a")]).exit_code == 0
    regressed = invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "json"])
    assert regressed.exit_code == 1
    assert json.loads(regressed.stdout)["regression"] is True
