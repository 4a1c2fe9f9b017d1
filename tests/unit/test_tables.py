"""The tables of the notebooks and the report."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from synthetic import crossing_at, table

from specdec.analysis.stats import cell_statistics
from specdec.figures.tables import by_concurrency, failures, gains, provenance


@pytest.fixture
def results() -> pd.DataFrame:
    found = table(crossing_at(6))
    failed = (found["arm"] == "static") & (found["concurrency"] == 8) & (found["worker"] == "v1")
    found.loc[failed, ["error", "output_tok_s"]] = ["ServerDied: no memory", np.nan]
    return found


def test_provenance_counts_failures_and_names_the_machine(results: pd.DataFrame) -> None:
    rows = provenance(results).iloc[:, 0]
    assert rows["cells"] == f"{len(results)}, of which 3 failed"
    assert rows["machine"] == "test machine, 2 cores"


def test_arms_stand_in_order_with_their_intervals(results: pd.DataFrame) -> None:
    shown = by_concurrency(results)
    assert shown.index.tolist() == [
        "baseline",
        *("v1 static EAGLE-3", "v1 dynamic, threshold 4", "v1 dynamic, threshold 16"),
        *("v2 static EAGLE-3", "v2 dynamic, threshold 4", "v2 dynamic, threshold 16"),
    ]
    first = cell_statistics(results).set_index(["worker", "arm_name", "concurrency"]).loc[("none", "baseline", 1)]
    assert shown.loc["baseline", 1] == f"{first['estimate']:.1f} ± {first['high'] - first['estimate']:.1f}"


def test_sglangs_own_switch_has_a_row_for_each_of_its_tiers() -> None:
    found = table(crossing_at(6), thresholds=(4,), workers=("v2", "v2-tree"), adaptive=(None, 4))
    own = ["v2 SGLang adaptive, default tiers", "v2 SGLang adaptive, tiers at 4"]
    ours = [f"{worker} {arm}" for worker in ("v2", "v2-tree") for arm in ("static EAGLE-3", "dynamic, threshold 4")]
    assert by_concurrency(found).index.tolist() == ["baseline", *ours[:2], *own, *ours[2:]]
    assert gains(found).index.tolist() == [*ours[:2], *own, *ours[2:]]
    assert (gains(found)["blocks"] == 3).all()


def test_what_failed_is_a_dash_not_a_number(results: pd.DataFrame) -> None:
    assert by_concurrency(results).loc["v1 static EAGLE-3", 8] == "-"
    assert failures(results)["error"].tolist() == ["ServerDied: no memory"] * 3


def test_one_repeat_has_no_interval_in_a_table() -> None:
    single = table(crossing_at(6), repeats=1)
    assert "±" not in by_concurrency(single).to_string()
    assert set(gains(single)["95 % interval"]) == {"-"}


def test_a_gain_over_the_whole_grid_needs_the_whole_grid(results: pd.DataFrame) -> None:
    shown = gains(results)
    assert shown.loc["v1 static EAGLE-3", "blocks"] == 0  # a concurrency is missing in every block
    assert shown.loc["v2 static EAGLE-3", "blocks"] == 3
    assert shown.loc["v2 static EAGLE-3", "worst"].endswith("at concurrency 32")
