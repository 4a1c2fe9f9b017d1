"""The plan: what is refused, and the balance of its order."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.runs.plan import SweepPlan, balanced_order, block_row, differences, make_plan
from specdec.servers.profile import load_profile

PLAN = make_plan("cpu-tiny", concurrencies=[1, 8], thresholds=[4], repeats=2)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"profile": "nope"}, "no profile 'nope'; known: cpu-tiny"),
        ({"sglang": "0.5.1"}, "not '0.5.1'"),
        ({"workers": ["v3"]}, "no worker 'v3'.*it has v1, v2"),
        ({"workers": ["v1", "v1"]}, "workers names 'v1' twice"),
        ({"workers": []}, "workers must not be empty"),
        ({"thresholds": [-1]}, "thresholds must be integers of 0 or more, got -1"),
        ({"thresholds": [2.5]}, "thresholds must be integers of 0 or more, got 2.5"),
        ({"thresholds": ["4"]}, "thresholds must be integers of 0 or more, got '4'"),
        ({"thresholds": [True]}, "thresholds must be integers of 0 or more, got True"),
        ({"thresholds": "4,8"}, "thresholds must be a list of integers, got '4,8'"),
        ({"thresholds": 4}, "thresholds must be a list of integers, got 4"),
        ({"concurrencies": [0]}, "concurrencies must be integers of 1 or more, got 0"),
        ({"concurrencies": [1, 1]}, "concurrencies names 1 twice"),
        ({"repeats": 0}, "repeats must be an integer of 1 or more, got 0"),
        ({"repeats": 1.0}, "repeats must be an integer of 1 or more, got 1.0"),
        ({"repeats": 3, "target_ci": 0.1, "max_repeats": 2}, "max_repeats must be an integer of 3 or more"),
        ({"max_repeats": 9}, "max_repeats needs a target_ci"),
        ({"target_ci": 0.0}, "target_ci must be a number above 0"),
        ({"target_ci": 0.1}, "target_ci needs max_repeats above repeats"),
        ({"target_ci": 5, "max_repeats": 9}, "target_ci is a share of the mean, below 1"),
        ({"output_tokens": 3000}, "output_tokens must be below the profile's --context-length of 2048, got 3000"),
        ({"output_tokens": 1}, "output_tokens must be an integer of 2 or more"),
        ({"slo_ttft_ms": -1}, "slo_ttft_ms must be a number above 0"),
        ({"seed": -1}, "seed must be an integer of 0 or more"),
    ],
)
def test_bad_input_is_one_line(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        make_plan(**wrong)
    assert "\n" not in str(caught.value)


def test_defaults_come_from_the_profile() -> None:
    plan, grid = make_plan(), load_profile("cpu-tiny").grid
    assert (plan.workers, plan.concurrencies, plan.thresholds) == (
        ("v1", "v2"),
        grid.concurrencies,
        grid.thresholds,
    )
    assert (plan.repeats, plan.max_repeats, plan.output_tokens) == (
        grid.repeats,
        grid.repeats,
        grid.output_tokens,
    )


def test_cells_are_the_whole_grid_once() -> None:
    cells = [cell for repeat in range(2) for cell in PLAN.cells(repeat)]
    assert len({cell.cell_id for cell in cells}) == len(cells) == 5 * 2 * 2
    assert {arm.name for arm in PLAN.arms()} == {
        "baseline",
        "v1-static",
        "v1-dynamic4",
        "v2-static",
        "v2-dynamic4",
    }
    assert "v1-dynamic4-c008-r1" in {cell.cell_id for cell in cells}


def test_threshold_0_is_the_arm_off() -> None:
    plan = make_plan(workers=["v2"], thresholds=[0, 4])
    assert [(arm.name, arm.arm, arm.threshold) for arm in plan.arms()] == [
        ("baseline", "baseline", None),
        ("v2-static", "static", None),
        ("v2-off", "off", 0),
        ("v2-dynamic4", "dynamic", 4),
    ]


def test_plan_survives_its_file() -> None:
    assert SweepPlan.model_validate_json(PLAN.model_dump_json()) == PLAN


def test_differences_name_what_differs() -> None:
    other = make_plan("cpu-tiny", concurrencies=[1, 8], thresholds=[2], repeats=3)
    assert differences(PLAN, other) == ["thresholds: [4], [2]", "repeats: 2, 3", "max_repeats: 2, 3"]
    changed = PLAN.model_copy(update={"profile": PLAN.profile.model_copy(update={"flags": ("--tp", "2")})})
    assert [line.split(":")[0] for line in differences(PLAN, changed)] == ["profile.flags"]
    assert differences(PLAN, PLAN) == []


def test_arms_of_a_block_get_the_same_prompts_and_blocks_get_others() -> None:
    from specdec.load.prompts import read_prompts
    from specdec.servers.profile import locate

    prompts = read_prompts(locate(PLAN.profile.prompts))
    by_block: dict[tuple[int, int], set[tuple[Any, ...]]] = {}
    for repeat in range(2):
        for cell in PLAN.cells(repeat):
            picked = tuple(PLAN.prompts(prompts, cell))
            assert len(picked) == PLAN.num_prompts(cell.concurrency)
            by_block.setdefault((cell.repeat, cell.concurrency), set()).add(picked)
    assert all(len(picks) == 1 for picks in by_block.values())
    assert len(set.union(*by_block.values())) == len(by_block)


# Balance


@given(st.integers(1, 12))
def test_balanced_order_is_a_latin_square(count: int) -> None:
    rows = [balanced_order(count, row) for row in range(count)]
    for line in [*rows, *zip(*rows, strict=True)]:
        assert sorted(line) == list(range(count))


@given(st.integers(1, 6).map(lambda half: 2 * half))
def test_even_squares_have_each_neighbour_once(count: int) -> None:
    pairs = Counter(pair for row in range(count) for pair in pairwise(balanced_order(count, row)))
    assert set(pairs.values()) <= {1}
    assert len(pairs) == count * (count - 1)


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 20))
def test_first_places_differ_by_at_most_one(arms: int, concurrencies: int, repeats: int) -> None:
    def first(repeat: int, index: int) -> int:
        return balanced_order(arms, block_row(repeat, index, concurrencies, arms))[0]

    def is_balanced(firsts: list[int]) -> bool:
        counts = [firsts.count(arm) for arm in range(arms)]
        return max(counts) - min(counts) <= 1

    grid = [[first(repeat, index) for index in range(concurrencies)] for repeat in range(repeats)]
    assert is_balanced([arm for row in grid for arm in row])
    assert all(is_balanced(row) for row in grid)
    assert all(is_balanced(list(column)) for column in zip(*grid, strict=True))


@given(
    workers=st.sampled_from([["v1"], ["v2"], ["v1", "v2"]]),
    concurrencies=st.lists(st.integers(1, 64), min_size=1, max_size=5, unique=True),
    thresholds=st.lists(st.integers(0, 16), min_size=1, max_size=3, unique=True),
    seed=st.integers(0, 5),
    side_by_side=st.booleans(),
)
def test_every_block_holds_every_arm_once_in_order(
    workers: list[str], concurrencies: list[int], thresholds: list[int], seed: int, side_by_side: bool
) -> None:
    profile = load_profile("cpu-tiny").model_copy(update={"side_by_side": side_by_side})
    plan = make_plan(profile, workers=workers, concurrencies=concurrencies, thresholds=thresholds, repeats=3, seed=seed)
    arms = set(plan.arms())
    for repeat in range(3):
        cells = plan.cells(repeat)
        assert len(cells) == len(arms) * len(concurrencies)
        for concurrency in concurrencies:
            block = [cell for cell in cells if cell.concurrency == concurrency]
            assert {cell.arm for cell in block} == arms
            assert [cell.order for cell in block] == list(range(len(arms)))


def test_servers_that_follow_each_other_change_as_little_as_can_be() -> None:
    plan = make_plan(load_profile("cpu-tiny").model_copy(update={"side_by_side": False}), repeats=4)
    workers = [cell.arm.worker for repeat in range(4) for cell in plan.cells(repeat)]
    starts = [workers[0], *(b for a, b in pairwise(workers) if a != b)]
    assert starts == ["none", "v1", "v2", "v1", "none", "v1", "v2", "v1", "none"]
