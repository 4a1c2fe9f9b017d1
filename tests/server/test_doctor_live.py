"""The doctor and the threshold command against servers that run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from shapes import SHAPES, WORKER_CLASS, on_one_shape

from specdec.servers.server import Server

pytestmark = pytest.mark.sglang

SPECDEC = str(Path(sys.executable).with_name("specdec"))


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SPECDEC, *words], capture_output=True, text=True, check=False)


def test_predicted_is_actual(shape: str, switched: Server) -> None:
    """Case 11: class, file and overlap as predicted from the server's own arguments are those that run."""
    done = command("doctor", "--json", "--url", switched.url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert WORKER_CLASS[SHAPES[shape].worker] in done.stdout
    json.loads(done.stdout)


def test_a_server_whose_plugin_is_inactive(baseline: Server) -> None:
    done = command("doctor", "--url", baseline.url)
    assert done.returncode == 1
    assert "inactive" in done.stdout + done.stderr


@on_one_shape
def test_the_threshold_command(switched: Server) -> None:
    done = command("threshold", "--url", switched.url, "6", "--resume", "2", "--dwell", "3")
    assert (done.returncode, done.stdout) == (0, "threshold 6, resume threshold 2, dwell 3 steps\n")
    state = switched.state()
    assert state is not None
    assert (state["threshold"], state["resume_threshold"], state["dwell_steps"]) == (6, 2, 3)
    for bad in (["-1"], ["x"], ["4", "--resume", "9"]):
        done = (
            command("threshold", "--url", switched.url, "--", *bad)
            if bad == ["-1"]
            else command("threshold", "--url", switched.url, *bad)
        )
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
    assert switched.state() == state | {"refused_change": state["refused_change"]}
