"""Profiles: what is refused, which commands come out, and that SGLang's own parser takes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import tomllib

from specdec.servers.profile import ROOT, known_profiles, load_profile, locate, plan_server
from specdec.servers.server import ServerPlan

CPU_TINY = (ROOT / "env" / "profiles" / "cpu-tiny.toml").read_text()
SWITCH = "--speculative-disable-batch-threshold"


def value(plan: ServerPlan, flag: str) -> str:
    return plan.command[plan.command.index(flag) + 1]


def changed(tmp_path: Path, old: str, new: str) -> Path:
    """cpu-tiny with one text replaced, as a file of its own."""
    assert old in CPU_TINY
    path = tmp_path / "cpu-tiny.toml"
    path.write_text(CPU_TINY.replace(old, new))
    return path


def test_the_profiles_load() -> None:
    assert known_profiles() == ["cpu-tiny", "glm5-nvfp4-8gpu", "gpu-tiny"]
    assert [load_profile(name).gpus for name in known_profiles()] == [0, 8, 1]


def test_models_and_prompts_of_cpu_tiny_are_in_the_repository() -> None:
    profile = load_profile("cpu-tiny")
    for place in (profile.model, profile.draft_model, profile.prompts):
        assert Path(locate(place)).is_relative_to(ROOT)
        assert Path(locate(place)).exists()
    assert locate("someone/model-on-a-hub") == "someone/model-on-a-hub"


def test_path_instead_of_name(tmp_path: Path) -> None:
    assert load_profile(changed(tmp_path, "repeats = 2", "repeats = 7")).grid.repeats == 7


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gpus = 0", "gpus = -1", "gpus: "),
        ("gpus = 0", "gpu = 0", "gpus: Field required"),
        ("side_by_side = true", 'side_by_side = true\ncolour = "red"', "colour: Extra inputs"),
        ("concurrencies = [1,", "concurrencies = [0,", "grid.concurrencies.0: "),
        ("repeats = 2", 'repeats = "two"', "grid.repeats: "),
        ('device = "cpu"', 'device = "tpu"', "device: "),
        ("topk = 1", "topk = 0", "topk: "),
        ("num_draft_tokens = 4", "num_draft_tokens = 5", "a chain .topk 1. verifies num_steps . 1"),
        ('name = "cpu-tiny"', 'name = "cpu-small"', "its name is 'cpu-small'"),
        ("./env/tiny_pair/draft", "./env/no_such_draft", "no_such_draft does not exist"),
        ("[grid]", "[grid", "line"),
        ('  "--enable-metrics",\n', "", "--enable-metrics is missing"),
        ('"--enable-metrics",', '"--enable-metrics", "--dp-size", "2",', "--dp-size: measure one replica"),
    ],
)
def test_bad_profile_is_one_line_that_names_the_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        load_profile(changed(tmp_path, old, new))
    assert "\n" not in str(refused.value)


def test_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no profile 'cpu-big'; known: cpu-tiny, glm5-nvfp4-8gpu"):
        load_profile("cpu-big")
    with pytest.raises(ValueError, match=r"no profile '/no/such\.toml'"):
        load_profile("/no/such.toml")


def test_outside_a_checkout_the_way_in_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("specdec.servers.profile.PROFILE_FOLDER", tmp_path / "none")
    with pytest.raises(ValueError, match=r"none outside a checkout of specdec .* pip install -e"):
        load_profile("cpu-tiny")


def test_baseline_has_no_speculative_flag() -> None:
    plan = plan_server(load_profile("cpu-tiny"), "baseline", "none")
    assert not [flag for flag in plan.flags if "speculative" in flag]
    assert "SGLANG_ENABLE_SPEC_V2" not in plan.env
    assert plan.name == "baseline"


@pytest.mark.parametrize(("worker", "topk", "tokens", "v2"), [("v1", "4", "16", "0"), ("v2", "1", "4", "1")])
def test_worker_arms_share_one_command(worker: str, topk: str, tokens: str, v2: str) -> None:
    profile = load_profile("cpu-tiny")
    plan = plan_server(profile, "static", worker)
    assert value(plan, "--speculative-eagle-topk") == topk
    assert value(plan, "--speculative-num-draft-tokens") == tokens
    assert value(plan, SWITCH) == "none"
    assert plan.env["SGLANG_ENABLE_SPEC_V2"] == v2
    assert {"--sleep-on-idle", "--enable-metrics"} <= set(plan.flags)
    for arm in ("dynamic", "off"):
        assert plan_server(profile, arm, worker).command == plan.command


def test_arms_differ_in_nothing_but_speculation() -> None:
    """What is common to baseline and worker arms is word for word the same."""
    profile = load_profile("cpu-tiny")
    baseline = plan_server(profile, "baseline", "none")
    static = plan_server(profile, "static", "v1")
    assert static.command[: len(baseline.command)] == baseline.command
    assert set(static.env) - set(baseline.env) == {"SGLANG_ENABLE_SPEC_V2"}


def test_port_is_left_open_and_paths_start_at_the_repository() -> None:
    plan = plan_server(load_profile("cpu-tiny"), "static", "v1")
    assert value(plan, "--port") == "{port}"
    assert plan.cwd == str(ROOT)
    assert str(ROOT) not in " ".join(plan.flags), "flags are written into results: no machine paths"


def test_eight_gpus() -> None:
    plan = plan_server(load_profile("glm5-nvfp4-8gpu"), "dynamic", "v1")
    assert value(plan, "--tp-size") == "8"
    assert value(plan, "--quantization") == "modelopt_fp4"
    assert value(plan, "--speculative-algorithm") == "EAGLE3"
    assert (value(plan, "--speculative-eagle-topk"), value(plan, "--speculative-num-draft-tokens")) == (
        "4",
        "16",
    )
    assert not load_profile("glm5-nvfp4-8gpu").side_by_side


@pytest.mark.parametrize(
    ("arm", "worker", "sglang", "message"),
    [
        ("fast", "v1", "0.5.12", "no arm 'fast'; known: baseline, static"),
        ("static", "v3", "0.5.12", "no worker 'v3' in profile cpu-tiny for SGLang 0.5.12; it has v1, v2"),
        ("static", "v1", "0.5.23", "no worker 'v1' .* it has v2"),
        ("static", "v1", "0.4.0", "profile cpu-tiny is for SGLang 0.5.12, 0.5.23, not '0.4.0'"),
        ("static", "none", "0.5.12", "the baseline, and only it, has worker 'none'"),
        ("baseline", "v1", "0.5.12", "the baseline, and only it, has worker 'none'"),
        ("adaptive", "v2", "0.5.12", "'adaptive' is SGLang 0.5.23's own switch"),
    ],
)
def test_plan_refuses_what_does_not_exist(arm: str, worker: str, sglang: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_server(load_profile("cpu-tiny"), arm, worker, sglang)


def test_adaptive_has_sglangs_switch_and_not_ours() -> None:
    plan = plan_server(load_profile("cpu-tiny"), "adaptive", "v2", "0.5.23")
    assert "--speculative-adaptive" in plan.flags
    assert SWITCH not in plan.flags


def test_requests_of_a_cell() -> None:
    grid = load_profile("cpu-tiny").grid
    assert grid.num_prompts(1) == grid.min_requests
    assert grid.num_prompts(32) == 32 * grid.requests_per_concurrency


PARSE = """
import argparse, json, sys
from specdec.sglang_plugin import flags
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
flags._add_flags(None, parser)
for arguments in json.load(sys.stdin):
    parser.parse_args(arguments)
print("accepted")
"""


@pytest.mark.sglang
def test_sglangs_own_parser_takes_every_command() -> None:
    """Also those of the profile that cannot be started here."""
    release = version("sglang")
    commands = []
    for profile in map(load_profile, known_profiles()):
        arms = [("baseline", "none"), *(("static", worker) for worker in profile.release(release).workers)]
        plans = [plan_server(profile, arm, worker, release) for arm, worker in arms]
        commands += [[flag.replace("{port}", "30000") for flag in plan.flags] for plan in plans]
    env = {**os.environ, **tomllib.loads(CPU_TINY)["env"], "TRITON_INTERPRET": "1"}
    parsed = subprocess.run(
        [sys.executable, "-c", PARSE], input=json.dumps(commands), env=env, capture_output=True, text=True
    )
    assert parsed.stdout.endswith("accepted\n"), parsed.stderr[-2000:]
