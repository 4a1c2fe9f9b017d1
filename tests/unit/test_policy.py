"""The policy as properties: what it promises for every sequence of batch sizes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.policy import Mode, SwitchSettings, ThresholdPolicy

BATCH_SIZES = st.lists(st.integers(1, 64), min_size=1, max_size=200)


@st.composite
def settings(draw: st.DrawFn) -> SwitchSettings:
    threshold = draw(st.none() | st.integers(0, 32))
    resume = draw(st.none() | st.integers(1, threshold)) if threshold else None
    return SwitchSettings(threshold, resume, draw(st.integers(1, 10)))


def modes(of: SwitchSettings, batch_sizes: list[int]) -> list[Mode]:
    policy = ThresholdPolicy(of)
    return [policy.decide(size) for size in batch_sizes]


@given(settings(), BATCH_SIZES)
def test_same_batch_sizes_same_decisions(of: SwitchSettings, batch_sizes: list[int]) -> None:
    assert modes(of, batch_sizes) == modes(of, batch_sizes)


@given(settings(), BATCH_SIZES)
def test_no_mode_is_left_before_its_dwell(of: SwitchSettings, batch_sizes: list[int]) -> None:
    runs = [len(list(run)) for _, run in itertools.groupby(modes(of, batch_sizes))]
    # The first run is the start-up mode, which may be left at once; the last one is still going on.
    assert all(length >= of.dwell_steps for length in runs[1:-1])


@given(settings(), BATCH_SIZES)
def test_without_dwell_the_mode_follows_the_two_thresholds(of: SwitchSettings, batch_sizes: list[int]) -> None:
    if of.threshold is None or of.resume_at is None or of.dwell_steps > 1:
        return
    mode = Mode.SPECULATIVE
    for size, decided in zip(batch_sizes, modes(of, batch_sizes), strict=True):
        if size > of.threshold:
            mode = Mode.PLAIN
        elif size <= of.resume_at:
            mode = Mode.SPECULATIVE
        assert decided is mode


@pytest.mark.parametrize(
    ("size", "mode"), [(3, Mode.SPECULATIVE), (4, Mode.SPECULATIVE), (5, Mode.PLAIN), (6, Mode.PLAIN)]
)
def test_the_threshold_itself_still_speculates(size: int, mode: Mode) -> None:
    assert modes(SwitchSettings(threshold=4), [size]) == [mode]


def test_zero_never_speculates_and_none_always_does() -> None:
    assert set(modes(SwitchSettings(threshold=0), [1, 2, 64])) == {Mode.PLAIN}
    assert set(modes(SwitchSettings(threshold=None), [1, 2, 64])) == {Mode.SPECULATIVE}


def test_dwell_holds_a_mode_after_a_switch() -> None:
    of = SwitchSettings(threshold=4, dwell_steps=3)
    assert [m.value[0] for m in modes(of, [1, 9, 1, 1, 1, 9, 1, 9])] == list("spppsssp")


def test_between_the_thresholds_the_mode_stays() -> None:
    of = SwitchSettings(threshold=8, resume_threshold=2)
    assert [m.value[0] for m in modes(of, [8, 9, 8, 3, 2, 8])] == list("sppp" + "ss")


@pytest.mark.parametrize(
    "bad",
    [
        {"threshold": -1},
        {"threshold": 2.0},
        {"threshold": True},
        {"threshold": "4"},
        {"threshold": 4, "resume_threshold": 5},
        {"threshold": 4, "resume_threshold": 0},
        {"resume_threshold": 2},
        {"threshold": 4, "dwell_steps": 0},
    ],
)
def test_impossible_settings_are_refused_in_one_line(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        SwitchSettings(**bad)  # type: ignore[arg-type]


def test_a_change_keeps_what_it_does_not_name() -> None:
    now = SwitchSettings(threshold=8, resume_threshold=4, dwell_steps=5)
    assert now.changed({"dwell_steps": 2}) == SwitchSettings(8, 4, 2)
    assert now.changed({"threshold": 3}) == SwitchSettings(3, None, 5), "an old resume threshold could be above it"
    assert now.changed({"threshold": None}) == SwitchSettings(None, None, 5)
    for bad in ({}, {"thresold": 3}, {"threshold": -3}, {"resume_threshold": 9}):
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            now.changed(bad)
