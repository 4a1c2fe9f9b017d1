"""The recommended threshold, on tables whose right answer is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from synthetic import crossing_at, table

from specdec.analysis.recommend import (
    Answer,
    Recommendation,
    crossover,
    measured_gains,
    recommend,
    recommend_threshold,
)

NOISE_TABLES = 100
CLEAR_TABLES = 30


def _answers(
    static_ratio: Callable[[int], float], tables: int = CLEAR_TABLES, **options: float
) -> list[Recommendation]:
    return [
        recommend_threshold(
            table(static_ratio, workers=["v1"], thresholds=[], seed=seed, **options),  # type: ignore[arg-type]
            "v1",
        )
        for seed in range(tables)
    ]


@pytest.mark.parametrize("batch", [3, 6, 12])
def test_a_clear_crossing_is_found(batch: int) -> None:
    answers = _answers(crossing_at(batch), noise=0.03, repeats=3)
    assert {answer.answer for answer in answers} == {Answer.THRESHOLD}
    # An estimate just below the true crossing is rounded down to the batch size before: that one is as right.
    named = [answer.threshold for answer in answers if answer.threshold]
    errors = [abs(np.log2((batch if found == batch - 1 else found) / batch)) for found in named]
    assert np.median(errors) < 0.3
    assert max(errors) < 1.0


@pytest.mark.parametrize(("repeats", "noise"), [(3, 0.03), (3, 0.1), (5, 0.05)])
def test_the_interval_holds_the_true_threshold(repeats: int, noise: float) -> None:
    named = [a for a in _answers(crossing_at(12), noise=noise, repeats=repeats) if a.threshold is not None]
    held = [a for a in named if a.low is not None and a.low <= 12 and (a.high is None or a.high >= 12)]
    assert len(held) >= 0.9 * len(named) > 0


@pytest.mark.parametrize(("repeats", "noise"), [(2, 0.02), (3, 0.02), (3, 0.1), (5, 0.05)])
def test_noise_alone_seldom_gives_a_threshold(repeats: int, noise: float) -> None:
    """False positives at 95 %: 5 of 100 tables are expected at most, 12 would be one in a thousand."""
    found = _answers(lambda _: 1.0, NOISE_TABLES, noise=noise, repeats=repeats)
    answers = Counter(answer.answer for answer in found)
    assert answers[Answer.THRESHOLD] + answers[Answer.ALWAYS] < 12
    assert answers[Answer.NO_THRESHOLD] + answers[Answer.NOT_ENOUGH_DATA] > 88


def test_one_noisy_concurrency_seldom_gives_a_threshold() -> None:
    positives = 0
    for seed in range(NOISE_TABLES):
        results = table(lambda _: 1.0, noise=0.02, workers=["v1"], thresholds=[], seed=seed)
        noisy = results["concurrency"] == 1
        noise = np.random.default_rng(1000 + seed).normal(0, 0.1, noisy.sum())
        results.loc[noisy, "output_tok_s"] *= np.exp(noise)
        positives += recommend_threshold(results, "v1").threshold is not None
    assert positives < 14


def test_speculation_that_always_loses_needs_no_threshold() -> None:
    answers = _answers(lambda _: 0.8, noise=0.03, repeats=3)
    assert {answer.answer for answer in answers} == {Answer.NO_THRESHOLD}
    assert "no threshold helps" in answers[0].text


def test_equal_arms_measured_well_say_that_no_threshold_helps() -> None:
    answers = Counter(answer.answer for answer in _answers(lambda _: 1.0, noise=0.005, repeats=5))
    assert answers[Answer.NO_THRESHOLD] > 0.85 * CLEAR_TABLES


def test_equal_arms_measured_badly_are_not_enough_data() -> None:
    answers = Counter(answer.answer for answer in _answers(lambda _: 1.0, noise=0.15, repeats=3))
    assert answers[Answer.NOT_ENOUGH_DATA] > 0.85 * CLEAR_TABLES


def test_speculation_that_always_wins_wants_no_threshold_in_the_measured_range() -> None:
    answers = _answers(lambda _: 1.3, noise=0.03, repeats=3)
    assert {answer.answer for answer in answers} == {Answer.ALWAYS}
    assert answers[0].low == 32


def test_a_gain_that_smaller_batches_lose_again_is_no_threshold() -> None:
    answer = recommend_threshold(table(lambda c: 1.2 if c == 32 else 0.7, noise=0.01), "v1")
    assert answer.answer is Answer.NO_THRESHOLD


@pytest.mark.parametrize("arm", ["baseline", "static"])
def test_a_missing_side_is_not_enough_data(arm: str) -> None:
    results = table(crossing_at(6))
    answer = recommend_threshold(results[results["arm"] != arm], "v1")
    assert answer.answer is Answer.NOT_ENOUGH_DATA
    assert "baseline and a static" in answer.text


def test_one_repeat_is_not_enough_data() -> None:
    answer = recommend_threshold(table(crossing_at(6), repeats=1), "v1")
    assert answer.answer is Answer.NOT_ENOUGH_DATA
    assert "2 repeats" in answer.reason


def test_a_server_that_admitted_fewer_requests_gives_thresholds_in_batches_it_ran() -> None:
    """Case 16: asked and achieved differ, as in InferenceX #1697."""
    results = table(crossing_at(6), noise=0.01)
    results["achieved_batch_peak"] = results["achieved_batch_peak"].clip(upper=12)
    answer = recommend_threshold(table(lambda _: 1.3).assign(achieved_batch_peak=results["achieved_batch_peak"]), "v1")
    assert answer.low == 12


def test_each_worker_has_its_own_answer() -> None:
    results = table(crossing_at(6))
    slower = (results["worker"] == "v2") & (results["arm"] == "static")
    results.loc[slower, "output_tok_s"] *= 0.4
    first, second = recommend(results)
    assert (first.worker, first.answer) == ("v1", Answer.THRESHOLD)
    assert (second.worker, second.answer) == ("v2", Answer.NO_THRESHOLD)


def test_sglangs_own_switch_changes_nothing_in_what_is_recommended() -> None:
    with_it = table(crossing_at(6), workers=("v2", "v2-tree"), adaptive=(4, None))
    found = recommend(with_it)
    assert [one.worker for one in found] == ["v2", "v2-tree"]
    assert found == recommend(with_it[with_it["arm"] != "adaptive"])
    assert [one.answer for one in found] == [Answer.THRESHOLD] * 2


def test_crossover_interpolates_between_measured_batches() -> None:
    ratios = np.array([[0.2, 0.1, -0.1], [-0.2, -0.1, -0.1], [0.2, 0.1, 0.1], [-0.1, 0.3, -0.3]])
    assert crossover(np.array([1.0, 4.0, 16.0]), ratios).tolist() == [8, 0, 16, 8]


def test_measured_gains_put_the_right_threshold_first() -> None:
    gains = measured_gains(table(crossing_at(6), noise=0.01)).set_index(["worker", "arm_name"])
    assert gains.loc["v1", "gain"].astype(float).idxmax() == "dynamic 4"
    assert gains.loc[("v1", "static"), "worst"] == pytest.approx(crossing_at(6)(32), rel=0.05)
    assert gains.loc[("v1", "static"), "worst_concurrency"] == 32
