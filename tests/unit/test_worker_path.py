"""The doctor's rules, text and live check, without SGLang and without a server of its."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec import worker_path
from specdec.worker_path import WorkerPath
from specdec.worker_path.settings import Settings

EAGLE3 = ["--model-path", "some/model", "--speculative-algorithm", "EAGLE3"]
CHAIN = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
TREE = [
    "--speculative-num-steps",
    "3",
    "--speculative-eagle-topk",
    "4",
    "--speculative-num-draft-tokens",
    "16",
]
SWITCH = ["--speculative-disable-batch-threshold", "8"]
V2_OFF = {"SGLANG_ENABLE_SPEC_V2": "0"}
RELEASES = pytest.mark.parametrize("release", worker_path.RELEASES)


def predict(
    *flags: str, release: str = "0.5.12", env: dict[str, str] | None = None, load: int | None = None
) -> WorkerPath:
    return worker_path.predict(flags, env or {}, release, load)


def llama(folder: Path, architecture: str = "LlamaForCausalLM") -> str:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}), encoding="utf-8")
    return str(folder)


# The paths


@pytest.mark.parametrize(
    ("flags", "env", "worker", "overlap"),
    [
        (CHAIN, {}, "EAGLEWorkerV2", True),
        (CHAIN, V2_OFF, "EAGLEWorker", False),
        ([*CHAIN, "--disable-overlap-schedule"], {}, "EAGLEWorker", False),
        (TREE, {}, "EAGLEWorker", False),
        (TREE, V2_OFF, "EAGLEWorker", False),
        ([*CHAIN, "--enable-multi-layer-eagle"], {}, "MultiLayerEagleWorkerV2", True),
        ([*TREE, "--enable-multi-layer-eagle"], {}, "MultiLayerEagleWorker", False),
    ],
)
def test_0_5_12_picks_the_worker_by_overlap(flags: list[str], env: dict[str, str], worker: str, overlap: bool) -> None:
    path = predict(*EAGLE3, *flags, env=env)
    assert (path.worker_class, path.overlap) == (worker, overlap)


@pytest.mark.parametrize(
    ("flags", "overlap"),
    [
        (CHAIN, True),
        (TREE, True),
        ([*TREE, "--disable-overlap-schedule"], False),
        ([*TREE, "--device", "cpu"], False),
        ([*TREE, "--device", "cuda:1"], True),
    ],
)
def test_0_5_23_has_one_worker(flags: list[str], overlap: bool) -> None:
    path = predict(*EAGLE3, *flags, release="0.5.23")
    assert path.worker_class == "EAGLEWorkerV2"
    assert path.worker_file == "sglang/srt/speculative/eagle_worker_v2.py"
    assert (path.overlap, path.switch_acts) == (overlap, True)


@RELEASES
def test_no_algorithm_is_no_worker(release: str) -> None:
    path = predict("--model-path", "m", release=release)
    assert (path.worker_class, path.worker_file, path.switch_acts) == (None, None, False)
    assert "no --speculative-algorithm" in path.switch_reason


def test_every_step_has_its_reason() -> None:
    path = predict(*EAGLE3, *TREE)
    text = "\n".join(path.reasons)
    for part in (
        "--speculative-algorithm EAGLE3",
        "overlap off: topk 4 is above 1",
        "EAGLE3 with overlap off: EAGLEWorker",
        "--device is not given",
    ):
        assert part in text


# Where the switch acts


@RELEASES
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--speculative-algorithm", "STANDALONE", *CHAIN], "StandaloneWorkerV2"),
        (["--speculative-algorithm", "NGRAM"], "NGRAMWorker"),
        (["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "d"], "DFlashWorker"),
        (["--speculative-algorithm", "FROZEN_KV_MTP"], "FrozenKVMTPWorker"),
        ([*EAGLE3, *CHAIN, "--enable-multi-layer-eagle"], "MultiLayerEagleWorkerV2"),
        (
            [*EAGLE3, *CHAIN, "--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"],
            "attention: an idle",
        ),
        ([*EAGLE3, *CHAIN, "--disaggregation-mode", "decode"], "--disaggregation-mode decode"),
        ([*EAGLE3, *CHAIN, "--enable-two-batch-overlap"], "two-batch-overlap"),
        ([*EAGLE3, *CHAIN, "--enable-pdmux"], "pdmux"),
        ([*EAGLE3, *CHAIN, "--enable-hisparse"], "hisparse"),
        ([*EAGLE3, *CHAIN, "--use-ray"], "load no plugins"),
        ([*EAGLE3, *CHAIN, "--lora-paths", "a=b"], "LoRA"),
        ([*EAGLE3, *CHAIN, "--speculative-adaptive"], "two controllers"),
        ([*EAGLE3, *CHAIN, "--pp-size", "2"], "--pp-size"),
        (["--speculative-algorithm", "NOSUCH"], "no speculative algorithm 'NOSUCH'"),
    ],
)
def test_the_switch_is_refused_by_name(flags: list[str], reason: str, release: str) -> None:
    path = predict(*flags, *SWITCH, release=release)
    assert not path.switch_acts
    assert reason in path.switch_reason


@pytest.mark.parametrize("flag", ["--speculative-use-rejection-sampling", "--speculative-use-block-verification"])
def test_a_plain_step_has_nothing_to_reject(flag: str) -> None:
    path = predict(*EAGLE3, *CHAIN, flag, *SWITCH, release="0.5.23")
    assert not path.switch_acts
    assert "rejection sampling" in path.switch_reason
    assert predict(*EAGLE3, *CHAIN, *SWITCH, release="0.5.23").switch_acts


def test_refusal_says_the_same_of_resolved_settings() -> None:
    for release in worker_path.RELEASES:
        args = Settings(speculative_algorithm="EAGLE3", speculative_eagle_topk=1)
        assert worker_path.refusal(args, release) is None
        args.pp_size = 2
        assert "pipeline parallel" in str(worker_path.refusal(args, release))
    with pytest.raises(ValueError, match=r"0\.5\.12 and 0\.5\.23"):
        worker_path.refusal(args, "0.5.13")


def test_overlap_reason_of_resolved_settings() -> None:
    args = Settings(speculative_algorithm="EAGLE3", speculative_eagle_topk=4)
    assert worker_path.overlap_reason(args, "0.5.12", {}) == "nothing turns it off"
    args.disable_overlap_schedule = True
    assert worker_path.overlap_reason(args, "0.5.12", {}) == "topk 4 is above 1"
    assert worker_path.overlap_reason(args, "0.5.12", V2_OFF) == "SGLANG_ENABLE_SPEC_V2=0"
    assert "--disable-overlap-schedule" in worker_path.overlap_reason(args, "0.5.23", V2_OFF)
    args.device = "cpu"
    assert "CPU" in worker_path.overlap_reason(args, "0.5.23", V2_OFF)


def test_adaptive_is_said_to_be_dropped_and_why() -> None:
    dropped = predict(*EAGLE3, *TREE, "--speculative-adaptive", release="0.5.23")
    assert any("dropped by SGLang: topk is 4" in warning for warning in dropped.warnings)
    assert dropped.switch_acts
    kept = predict(*EAGLE3, "--speculative-adaptive", release="0.5.23")
    assert any("in force, with steps [0, 1, 3, 5, 7], 0 among them" in reason for reason in kept.reasons)
    assert (kept.num_steps, kept.topk, kept.num_draft_tokens) == (3, 1, 4)


# What cannot be known, and what config.json tells


def test_parameters_that_the_model_decides(tmp_path: Path) -> None:
    unknown = predict("--model-path", "meta/llama", "--speculative-algorithm", "EAGLE3")
    assert (unknown.num_steps, unknown.topk) == (None, None)
    assert any("chooses them by the target's architecture" in line for line in unknown.unknown)
    assert not unknown.switch_acts
    known = predict("--model-path", llama(tmp_path), "--speculative-algorithm", "EAGLE3")
    assert (known.num_steps, known.topk, known.num_draft_tokens) == (5, 4, 8)
    assert not known.unknown


@pytest.mark.parametrize(("algorithm", "multi_layer"), [("EAGLE", True), ("NEXTN", False), ("eagle", False)])
def test_a_multi_layer_target_is_seen_by_the_typed_name(algorithm: str, multi_layer: bool, tmp_path: Path) -> None:
    target = llama(tmp_path, "MiMoV2FlashForCausalLM")
    path = predict("--model-path", target, "--speculative-algorithm", algorithm, *CHAIN)
    assert str(path.worker_class).startswith("MultiLayer") == multi_layer


def test_a_broken_config_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json is not a model's"):
        predict("--model-path", str(tmp_path), "--speculative-algorithm", "EAGLE3")


# The cases of other people's reports


@RELEASES
def test_case_8_the_cap_of_48_running_requests_is_said(release: str) -> None:
    silent = predict(*EAGLE3, *CHAIN, release=release)
    assert silent.max_running_requests == 48
    assert any("capped at 48" in warning for warning in silent.warnings)
    loaded = predict(*EAGLE3, *CHAIN, release=release, load=64)
    assert any("of 64 concurrent requests 16 wait" in warning for warning in loaded.warnings)
    given = predict(*EAGLE3, *CHAIN, "--max-running-requests", "64", release=release, load=64)
    assert not any("capped" in warning or "wait" in warning for warning in given.warnings)


def test_case_10_topk_above_1_on_the_overlap_worker(tmp_path: Path) -> None:
    """SGLang 0.5.12 leaves overlap on when it chooses topk itself; its overlap worker takes only chains."""
    flags = ["--model-path", llama(tmp_path), "--speculative-algorithm", "EAGLE3", *SWITCH]
    path = predict(*flags)
    assert (path.worker_class, path.topk, path.switch_acts) == ("EAGLEWorkerV2", 4, False)
    assert "two ways out: --speculative-eagle-topk 1" in path.switch_reason
    assert "SGLANG_ENABLE_SPEC_V2=0" in path.switch_reason
    assert predict(*flags, *CHAIN).switch_acts
    assert predict(*flags, env=V2_OFF).switch_acts
    assert predict(*flags, release="0.5.23").switch_acts


def test_case_10_v2_asked_for_with_a_tree_runs_v1() -> None:
    path = predict(*EAGLE3, *TREE, env={"SGLANG_ENABLE_SPEC_V2": "1"})
    assert path.worker_class == "EAGLEWorker"
    assert any("asks for v2, but topk 4" in warning for warning in path.warnings)


def test_case_11_the_doctor_names_worker_file_overlap_and_dead_variables() -> None:
    env = {"SGLANG_ENABLE_SPEC_V2": "1", "SGLANG_SPEC_NOSUCH": "1", "SGLANG_LOG_MS": "1", "HOME": "/"}
    path = predict(*EAGLE3, *CHAIN, release="0.5.23", env=env)
    text = worker_path.render(path)
    assert "EAGLEWorkerV2 (sglang/srt/speculative/eagle_worker_v2.py), overlap on" in text
    assert "SPEC_V2=1 does nothing: SGLang 0.5.23 has no such variable (SGLang 0.5.12 has it)" in text
    assert "SGLANG_SPEC_NOSUCH=1 does nothing" in text
    assert "SGLANG_LOG_MS" not in text
    assert not any("does nothing" in line for line in predict(*EAGLE3, *CHAIN, env=V2_OFF).warnings)


def test_v2_asked_for_without_overlap_does_nothing() -> None:
    flags = [*EAGLE3, *CHAIN, "--disable-overlap-schedule"]
    path = predict(*flags, env={"SGLANG_ENABLE_SPEC_V2": "1"})
    assert any("does nothing here: overlap is off" in warning for warning in path.warnings)


@pytest.mark.parametrize(("value", "overlap"), [("no", False), ("FALSE", False), ("off", True), ("", True)])
def test_a_variable_is_read_as_sglang_reads_it(value: str, overlap: bool) -> None:
    path = predict(*EAGLE3, *CHAIN, env={"SGLANG_ENABLE_SPEC_V2": value})
    assert path.overlap == overlap
    assert any("is not boolean" in warning for warning in path.warnings) == (value in ("off", ""))


@pytest.mark.parametrize(
    ("release", "flags", "warning"),
    [
        ("0.5.12", ["--cuda-graph-max-bs", "32"], "above 32 run without a CUDA graph"),
        ("0.5.12", ["--cuda-graph-bs", "1", "8"], "above 8 run without a CUDA graph"),
        ("0.5.12", ["--cuda-graph-max-bs", "60"], None),
        ("0.5.12", ["--disable-cuda-graph"], "above 0 run without a CUDA graph"),
        ("0.5.12", ["--device", "cpu"], None),
        ("0.5.12", [], "may exceed the CUDA graph's ceiling"),
        ("0.5.23", ["--cuda-graph-max-bs-decode", "32"], "above 32 run without a CUDA graph"),
        ("0.5.23", ["--cuda-graph-config", '{"decode": {"max_bs": 16}}'], "above 16 run"),
        ("0.5.23", ["--cuda-graph-backend-decode", "disabled"], "above 0 run without a CUDA graph"),
    ],
)
def test_the_graph_s_ceiling_below_the_load(release: str, flags: list[str], warning: str | None) -> None:
    running = ["--max-running-requests", "100"]
    path = predict(*EAGLE3, *CHAIN, *running, *flags, release=release, load=60)
    graphs = [line for line in path.warnings if "CUDA graph" in line]
    assert len(graphs) == (warning is not None)
    assert warning is None or warning in graphs[0]


def test_the_graph_s_ceiling_concerns_only_batches_that_run() -> None:
    flags = [*EAGLE3, *CHAIN, "--cuda-graph-max-bs", "48"]
    assert not any("CUDA graph" in line for line in predict(*flags, load=500).warnings)


# Flags


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--speculative-eagle-top-k", "1"], "did you mean --speculative-eagle-topk?"),
        (["--attn-dp-size", "2"], "0.5.23 has it"),
        (["--speculative-num-steps", "x"], "invalid int value: 'x'"),
        (["--speculative-num-steps"], "expected one argument"),
        (["--speculative"], "ambiguous"),
        (["python", "-m", "sglang.launch_server"], "give what follows"),
        (["--config", "c.yaml"], "--config is not read"),
        (["--speculative-disable-batch-threshold", "x"], "an integer or none, not 'x'"),
        (["--speculative-disable-batch-threshold", "-1"], "0 or more, not -1"),
        (["--speculative-resume-batch-threshold", "4"], "no effect without"),
    ],
)
def test_bad_flags_are_one_line(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        predict(*flags)
    assert "\n" not in str(error.value)


def test_flags_may_be_abbreviated_and_joined_as_sglang_takes_them() -> None:
    path = predict("--speculative-algo=EAGLE3", "--speculative-num-st", "3", "--speculative-eagle-topk=1", "--tp=8")
    assert path.worker_class == "EAGLEWorkerV2"


def test_a_switch_that_was_not_asked_for_is_not_loaded() -> None:
    assert predict(*EAGLE3, *CHAIN, *SWITCH).switch_asked
    silent = predict(*EAGLE3, *CHAIN)
    assert any("the switch is not loaded" in warning for warning in silent.warnings)


@pytest.mark.parametrize("load", [0, -3])
def test_a_load_is_at_least_1(load: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        predict(*EAGLE3, load=load)


def test_it_needs_neither_sglang_nor_torch() -> None:
    code = "import sys, specdec.worker_path; print({'torch', 'sglang', 'pandas', 'typer'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_json_and_text_hold_the_same_answer() -> None:
    path = predict(*EAGLE3, *TREE, *SWITCH)
    assert json.loads(json.dumps(path.to_dict()))["worker_class"] == "EAGLEWorker"
    text = worker_path.render(path)
    assert text.startswith("SGLang 0.5.12 runs EAGLEWorker (sglang/srt/speculative/eagle_worker.py), overlap off")
    assert all(line in text for line in [*path.reasons, *path.warnings, path.switch_reason])


# A running server


STATE = {
    "plugin_version": "0.1.0",
    "sglang_version": "0.5.12",
    "active": True,
    "inactive_reason": None,
    "worker_class": "EAGLEWorker",
    "worker_file": "sglang/srt/speculative/eagle_worker.py",
    "overlap": False,
    "threshold": 8,
    "resume_threshold": None,
    "dwell_steps": 1,
    "mode": "plain",
    "speculative_steps": 120,
    "plain_steps": 33,
    "switches_off": 2,
    "switches_on": 1,
    "accept_length": 2.4,
}
INFO = {
    "version": "0.5.12",
    "device": "cpu",
    "speculative_algorithm": "EAGLE3",
    "speculative_eagle_topk": 4,
    "disable_overlap_schedule": True,
}


@contextmanager
def server(answer: Any, status: int = 200) -> Iterator[str]:
    """Answers /server_info as an SGLang server would."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/server_info"
            self.send_response(status if found else 404)
            self.end_headers()
            self.wfile.write((answer if isinstance(answer, str) else json.dumps(answer)).encode())

        def log_message(self, *args: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def test_live_a_switch_that_acts() -> None:
    with server({**INFO, "internal_states": [{"specdec": STATE}]}) as url:
        check = worker_path.check_live(url)
    assert (check.plugin, check.switch_acts, check.differences) == ("active", True, [])
    assert (check.predicted_class, check.overlap_reason) == ("EAGLEWorker", "topk 4 is above 1")
    text = worker_path.render_live(check)
    for part in ("specdec 0.1.0, threshold 8", "120 speculative and 33 plain steps", "eagle_worker.py"):
        assert part in text
    assert json.loads(json.dumps(check.to_dict()))["states"][0]["threshold"] == 8


def test_live_no_plugin_is_told_apart_from_an_inactive_one() -> None:
    with server({**INFO, "internal_states": [{}]}) as url:
        absent = worker_path.check_live(url)
    state = {**STATE, "active": False, "inactive_reason": "started without the flag", "threshold": None}
    with server({**INFO, "internal_states": [{"specdec": state}]}) as url:
        inactive = worker_path.check_live(url)
    assert (absent.plugin, absent.switch_acts, absent.states) == ("absent", False, [])
    assert "without the specdec plugin" in absent.switch_reason
    assert (inactive.plugin, inactive.switch_acts) == ("inactive", False)
    assert inactive.switch_reason == "started without the flag"
    assert inactive.differences == []


def test_live_a_worker_other_than_predicted_is_a_difference() -> None:
    other = {**STATE, "worker_class": "EAGLEWorkerV2", "overlap": True}
    with server({**INFO, "internal_states": [{"specdec": STATE}, {"specdec": other}]}) as url:
        check = worker_path.check_live(url)
    assert [line.split(":")[0] for line in check.differences] == ["rank 1", "rank 1"]
    assert not check.switch_acts
    assert "differs" in worker_path.render_live(check)


def test_live_a_baseline_server_has_nothing_to_switch() -> None:
    state = {
        **STATE,
        "active": False,
        "inactive_reason": "no flag",
        "worker_class": None,
        "worker_file": None,
    }
    info = {**INFO, "speculative_algorithm": None, "internal_states": [{"specdec": state}]}
    with server(info) as url:
        check = worker_path.check_live(url)
    assert check.differences == []
    assert "no --speculative-algorithm" in check.switch_reason


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        ("<html>", 200, "does not answer with JSON"),
        ({}, 200, "has no internal_states"),
        ({"internal_states": [], "version": "0.4.9"}, 200, "runs SGLang 0.4.9"),
        ({}, 401, "answers 401"),
    ],
)
def test_live_an_answer_that_is_not_a_supported_sglang_s(answer: Any, status: int, message: str) -> None:
    with server(answer, status) as url, pytest.raises(ValueError, match=message) as error:
        worker_path.check_live(url)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("url", "message"), [("http://127.0.0.1:9", "no server answers"), ("localhost:1", "URL")])
def test_live_nothing_there(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        worker_path.check_live(url)


# The command


def doctor(*arguments: str) -> SimpleNamespace:
    command = [sys.executable, "-c", "from specdec.cli import main; main()", "doctor", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


def test_the_command_s_exit_codes() -> None:
    acts = doctor("--sglang", "0.5.12", "--json", "--", *EAGLE3, *TREE, *SWITCH)
    assert (acts.code, json.loads(acts.out)["worker_class"]) == (0, "EAGLEWorker")
    cannot = doctor("--sglang", "0.5.12", "--", "--speculative-algorithm", "NGRAM")
    assert (cannot.code, "does not support NGRAMWorker" in cannot.out) == (1, True)
    for bad in (["--", "--nonsense"], ["--url", "http://127.0.0.1:9"], ["--url", "http://x", "--", *EAGLE3]):
        result = doctor("--sglang", "0.5.12", *bad) if "--url" not in bad else doctor(*bad)
        assert result.code == 2
        assert result.err.startswith("specdec: ")
        assert len(result.err.splitlines()) == 1


def test_the_command_checks_a_live_server() -> None:
    with server({**INFO, "internal_states": [{"specdec": STATE}]}) as url:
        assert doctor("--url", url).code == 0
    with server({**INFO, "internal_states": [{}]}) as url:
        result = doctor("--url", url, "--json")
    assert (result.code, json.loads(result.out)["plugin"]) == (1, "absent")
