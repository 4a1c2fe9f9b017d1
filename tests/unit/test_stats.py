"""Intervals, paired ratios and the envelope, on tables whose right answer is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats
from synthetic import crossing_at, table

from specdec.analysis.stats import (
    arm_name,
    arm_sort_key,
    cell_statistics,
    envelope,
    envelope_distance,
    holm,
    mean_interval,
    ratio_interval,
    ratio_statistics,
)


def test_mean_interval_is_students_t() -> None:
    values = [10.0, 12.0, 11.0, 15.0]
    found = mean_interval(values)
    low, high = scipy_stats.t.interval(0.95, 3, np.mean(values), scipy_stats.sem(values))
    assert (found.estimate, found.low, found.high, found.n) == pytest.approx((12.0, low, high, 4))


def test_one_repeat_has_no_interval() -> None:
    found = mean_interval([5.0])
    assert found.estimate == 5.0
    assert not found.known
    assert mean_interval([]).n == 0


def test_ratios_average_as_logarithms() -> None:
    assert ratio_interval([2.0, 0.5]).estimate == pytest.approx(1.0)


def test_holm_on_a_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_arm_names_sort_as_figures_list_them() -> None:
    names = [
        arm_name("adaptive", 8),
        arm_name("adaptive", np.nan),
        arm_name("adaptive", 4.0),
        arm_name("off", 0),
        arm_name("dynamic", 16),
        arm_name("dynamic", 4),
        "static",
        arm_name("baseline", None),
    ]
    assert sorted(names, key=arm_sort_key) == [
        *("baseline", "static", "off", "dynamic 4", "dynamic 16"),
        *("adaptive", "adaptive 4", "adaptive 8"),
    ]


def test_pairing_cancels_the_drift_of_a_block() -> None:
    drifting = table(lambda _: 1.3, noise=0.0, drift=0.5, repeats=4)
    ratios = ratio_statistics(drifting)
    static = ratios[ratios["arm_name"] == "static"]
    assert static["estimate"].to_numpy() == pytest.approx(1.3)
    assert (static["high"] - static["low"]).to_numpy() == pytest.approx(0.0, abs=1e-9)
    plain = cell_statistics(drifting)
    assert ((plain["high"] - plain["low"]) / plain["estimate"] > 0.3).all()


def test_interval_of_the_ratio_covers_the_truth_in_95_of_100_tables() -> None:
    covered = 0
    for seed in range(200):
        ratios = ratio_statistics(
            table(
                lambda _: 1.3,
                noise=0.05,
                repeats=4,
                concurrencies=[8],
                workers=["v1"],
                thresholds=[],
                seed=seed,
            )
        )
        covered += bool(ratios["low"].iloc[0] <= 1.3 <= ratios["high"].iloc[0])
    assert 180 <= covered <= 199


def test_a_failed_cell_is_left_out_and_never_zero() -> None:
    results = table(crossing_at(6))
    failed = (results["arm"] == "static") & (results["concurrency"] == 8) & (results["repeat"] == 0)
    results.loc[failed, ["error", "output_tok_s"]] = ["ServerDied", 0.0]
    rows = cell_statistics(results)
    cell = rows.set_index(["worker", "arm_name", "concurrency"]).loc[("v1", "static", 8)]
    assert cell["n"] == 2
    whole = table(crossing_at(6))
    kept = whole[(whole["arm"] == "static") & (whole["concurrency"] == 8) & (whole["worker"] == "v1")]
    assert cell["estimate"] == pytest.approx(kept["output_tok_s"].iloc[1:].mean())


def test_a_failed_baseline_takes_its_whole_block_out_of_the_ratios() -> None:
    results = table(crossing_at(6))
    results.loc[(results["arm"] == "baseline") & (results["repeat"] == 1), "error"] = "ServerDied"
    assert set(ratio_statistics(results)["n"]) == {2}


def test_envelope_takes_the_better_arm_on_each_side_of_the_crossing() -> None:
    found = envelope(table(crossing_at(6), noise=0.0, drift=0.0))
    arms = found[found["worker"] == "v1"].set_index("concurrency")["envelope_arm"].to_dict()
    assert arms == {1: "static", 2: "static", 4: "static", 8: "baseline", 16: "baseline", 32: "baseline"}


def test_distance_from_the_envelope_shows_a_bad_threshold() -> None:
    found = envelope_distance(table(crossing_at(6), noise=0.0))
    found = found[found["worker"] == "v2"].set_index(["arm_name", "concurrency"])["estimate"]
    assert found["dynamic 4"].to_numpy() == pytest.approx(1.0)
    assert found["dynamic 16", 4] == pytest.approx(1.0)
    assert found["dynamic 16", 16] == pytest.approx(crossing_at(6)(16))


def test_what_off_costs_is_told_against_the_baseline() -> None:
    """Case 2: not against a server that speculates, beside which any off looks good."""
    found = ratio_statistics(table(lambda _: 0.5, noise=0.0, off_cost=0.3))
    off = found[(found["arm_name"] == "dynamic 4") & (found["concurrency"] > 4)]
    assert off["estimate"].to_numpy() == pytest.approx(0.7)


def test_nullable_columns_of_a_real_table_are_understood() -> None:
    results = table(crossing_at(6))
    typed = results.astype({"threshold": "Int64", "arm": "string", "error": "string", "concurrency": "Int64"})
    pd.testing.assert_frame_equal(cell_statistics(typed), cell_statistics(results), check_dtype=False)
    pd.testing.assert_frame_equal(envelope_distance(typed), envelope_distance(results), check_dtype=False)
