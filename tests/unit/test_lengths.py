"""Lengths by distribution: moments, bounds, seeds, and texts that name none."""

from __future__ import annotations

import statistics

import pytest

from specdec.load.lengths import CUT_AT_MEDIANS, parse_lengths

COUNT = 20_000


def test_fixed() -> None:
    assert parse_lengths("output_tokens", "64").draw(3, "seed") == [64, 64, 64]


def test_uniform_takes_both_ends_and_all_between_alike() -> None:
    drawn = parse_lengths("output_tokens", "uniform:16,128").draw(COUNT, "seed")
    assert set(drawn) == set(range(16, 129))
    assert statistics.mean(drawn) == pytest.approx(72, rel=0.02)
    assert statistics.stdev(drawn) == pytest.approx((113**2 / 12) ** 0.5, rel=0.02)


def test_lognormal_has_its_median_and_sigma() -> None:
    drawn = parse_lengths("output_tokens", "lognormal:64,0.5").draw(COUNT, "seed")
    quarter, median, _ = statistics.quantiles(drawn, n=4)
    assert median == pytest.approx(64, rel=0.03)
    assert median / quarter == pytest.approx(2.718281828 ** (0.6745 * 0.5), rel=0.03)
    assert statistics.mean(drawn) == pytest.approx(64 * 2.718281828 ** (0.5**2 / 2), rel=0.03)


def test_lognormal_is_cut_at_both_ends() -> None:
    drawn = parse_lengths("output_tokens", "lognormal:8,2.5").draw(COUNT, "seed")
    assert min(drawn) == 1
    assert max(drawn) == CUT_AT_MEDIANS * 8


def test_the_same_seed_draws_the_same() -> None:
    lengths = parse_lengths("output_tokens", "lognormal:64,0.5")
    assert lengths.draw(50, "a") == lengths.draw(50, "a") != lengths.draw(50, "b")
    assert lengths.draw(50, "a")[:20] == lengths.draw(20, "a")


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "x", "0", "-1", "1.5", "nan", "inf", "64,65", "2000000"),
        *("uniform", "uniform:", "uniform:5", "uniform:9,5", "uniform:0,5", "uniform:1,2,3", "uniform:1.5,2"),
        *("lognormal:64", "lognormal:64,0", "lognormal:64,-1", "lognormal:64,9", "lognormal:0.5,1"),
        *("lognormal:64,nan", "lognormal:nan,1", "lognormal:inf,1", "normal:64,5", "fixed:64", "uniform:1,2:3"),
    ],
)
def test_other_texts_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r'^output_tokens must be "64" \(fixed\), "uniform:16,128"') as error:
        parse_lengths("output_tokens", text)
    assert repr(text) in str(error.value)
    assert "\n" not in str(error.value)
