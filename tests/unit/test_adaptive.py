"""SGLang's own switch as an arm: its servers, its tiers, and that a server which dropped it is not measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import Behaviour
from sweep_fakes import fake_servers

from specdec.runs import sweep
from specdec.runs.plan import make_plan
from specdec.runs.sweep import run_sweep
from specdec.servers.adaptive import AdaptiveTiers
from specdec.servers.profile import Worker, load_profile, plan_server

PLAN = make_plan("cpu-tiny", sglang="0.5.23", concurrencies=[1], thresholds=[0, 4], repeats=1)
CONFIG = "--speculative-adaptive-config"


def test_one_run_holds_ours_and_sglangs_side_by_side() -> None:
    assert [(arm.name, arm.server) for arm in PLAN.arms()] == [
        ("baseline", "baseline"),
        ("v2-static", "v2"),
        ("v2-off", "v2"),
        ("v2-dynamic4", "v2"),
        ("v2-adaptive4", "v2-adaptive4"),
        ("v2-adaptive", "v2-adaptive"),
        ("v2-tree-static", "v2-tree"),
        ("v2-tree-off", "v2-tree"),
        ("v2-tree-dynamic4", "v2-tree"),
    ]


def test_the_tiers_switch_where_the_threshold_does(tmp_path: Path) -> None:
    plan = plan_server(load_profile("cpu-tiny"), "adaptive", "v2", "0.5.23", AdaptiveTiers(4, tmp_path))
    assert plan.name == "v2-adaptive4"
    path = Path(plan.flags[plan.flags.index(CONFIG) + 1])
    assert json.loads(path.read_text()) == {"1": {"candidate_steps": [3]}, "5": {"candidate_steps": [0]}}


def test_its_default_tiers_need_no_file() -> None:
    plan = plan_server(load_profile("cpu-tiny"), "adaptive", "v2", "0.5.23")
    assert plan.name == "v2-adaptive"
    assert plan.flags[-1] == "--speculative-adaptive"


def test_a_tree_has_no_adaptive_arm() -> None:
    with pytest.raises(ValueError, match="runs chains"):
        Worker(topk=4, num_steps=3, num_draft_tokens=16, adaptive=True)


def test_each_has_a_row_of_its_own_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    servers = fake_servers(monkeypatch)
    monkeypatch.setattr(sweep, "installed_release", lambda: "0.5.23")
    rows = run_sweep(PLAN, tmp_path).set_index("cell_id")
    assert rows["error"].isna().all()
    started = sorted(server.plan.name for server in servers.started)
    assert started == ["baseline", "v2", "v2-adaptive", "v2-adaptive4", "v2-tree"]
    assert rows.loc["v2-adaptive4-c001-r0", "threshold"] == 4
    assert rows.loc["v2-adaptive4-c001-r0", "topk"] == 4  # as the fake says
    assert rows["threshold"].isna()["v2-adaptive-c001-r0"]


def test_a_server_that_dropped_it_is_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SGLang only logs that it does not switch; the numbers would be those of static EAGLE-3."""
    fake_servers(monkeypatch).behaviour = Behaviour(adaptive_dropped=True)
    monkeypatch.setattr(sweep, "installed_release", lambda: "0.5.23")
    rows = run_sweep(PLAN, tmp_path)
    failed = rows[rows["error"].notna()]
    assert set(failed["arm"]) == {"adaptive"}
    assert failed["error"].str.contains("dropped --speculative-adaptive").all()


def test_servers_that_follow_each_other_do_so_by_server() -> None:
    profile = load_profile("cpu-tiny").model_copy(update={"side_by_side": False})
    plan = make_plan(profile, sglang="0.5.23", concurrencies=[1, 8], thresholds=[4], repeats=2)
    order = [cell.arm.server for cell in plan.cells(0)]
    assert list(dict.fromkeys(order)) == ["baseline", "v2", "v2-adaptive4", "v2-adaptive", "v2-tree"]
    assert order == sorted(order, key=list(dict.fromkeys(order)).index), "a server is started once a repeat"
    assert plan.cells(1)[0].arm.server == "v2-tree", "the server that is still up"
