"""A flag that cannot take effect stops the start with the reason: SGLang's own argument handling, with the plugin."""

import json
import os
import subprocess
import sys

import pytest
from client import ROOT
from shapes import PROFILE, RELEASE

pytestmark = pytest.mark.sglang
THRESHOLD = "--speculative-disable-batch-threshold"
TARGET = str(ROOT / "env/tiny_pair/target")
BASE = ["--model-path", TARGET, "--device", "cpu", "--dtype", "float32", "--mem-fraction-static", "0.1"]
EAGLE3 = [
    *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(ROOT / "env/tiny_pair/draft")),
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
]
REFUSED = {
    "a negative threshold": ([*EAGLE3, THRESHOLD, "-1"], "0 or more"),
    "a resume threshold above it": ([*EAGLE3, THRESHOLD, "4", "--speculative-resume-batch-threshold", "5"], "above"),
    "a resume threshold alone": ([*EAGLE3, "--speculative-resume-batch-threshold", "5"], "no effect"),
    "a dwell alone": ([*EAGLE3, "--speculative-disable-dwell-steps", "5"], "no effect"),
    "no speculation": ([THRESHOLD, "4"], "speculative-algorithm"),
    "another worker": ([*EAGLE3, "--speculative-algorithm", "STANDALONE", THRESHOLD, "4"], "Standalone"),
    "data-parallel attention (case 25)": (
        [*EAGLE3, THRESHOLD, "4", "--enable-dp-attention", "--dp-size", "2", "--tp-size", "2"],
        "data-parallel attention",
    ),
    "a scheduler that loads no plugins": ([*EAGLE3, THRESHOLD, "4", "--use-ray"], "--use-ray"),
    "its own adaptive switch": ([*EAGLE3, THRESHOLD, "4", "--speculative-adaptive"], "adaptive"),
}
PROGRAM = """
import contextlib, io, json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
said = {}
for name, flags in json.load(sys.stdin).items():
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        try:
            args = prepare_server_args(flags)
            getattr(args, "resolve_once", lambda: None)()
            code = 0
        except SystemExit as end:
            code = end.code
        except Exception as error:
            code = f"SGLang itself: {error!r}"
    said[name] = [code, err.getvalue()]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, tuple[int, str]]:
    """Exit code and what stderr said for each command line, all in one process (importing SGLang takes seconds)."""
    cases = {name: BASE + flags for name, (flags, _) in REFUSED.items()}
    cases["accepted"] = [*BASE, *EAGLE3, THRESHOLD, "4", "--speculative-resume-batch-threshold", "2"]
    env = os.environ | PROFILE.env | PROFILE.release(RELEASE).env
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(cases), capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: dict[str, tuple[int, str]] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_act_is_refused_with_the_reason(said: dict[str, tuple[int, str]], name: str) -> None:
    """Case 1: never accepted and inert."""
    code, text = said[name]
    lines = [line for line in text.splitlines() if line.startswith("specdec: ")]
    assert code == 2, text[-500:]
    assert len(lines) == 1
    assert REFUSED[name][1] in lines[0]


def test_what_can_act_is_accepted(said: dict[str, tuple[int, str]]) -> None:
    assert said["accepted"][0] == 0, said["accepted"][1][-500:]
