"""Running notebooks: what must fail fails, soon and with the reason; what is run directly refuses bad
parameters.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from specdec.notebooks import NotebookFailed, check_executed, run_notebook
from specdec.servers.profile import ROOT
from specdec.servers.supervise import is_alive, tree_processes

Write = Callable[..., Path]
SWEEP = ROOT / "notebooks" / "02_threshold_sweep.ipynb"


def test_a_notebook_is_run_with_its_parameters(write_notebook: Write, tmp_path: Path) -> None:
    said: list[str] = []
    executed = run_notebook(write_notebook("print(n + 1)"), tmp_path / "out", {"n": 41}, said.append)
    assert executed == tmp_path / "out" / "notebooks" / "made__n=41.ipynb"
    assert nbformat.read(executed, as_version=4).cells[-1].outputs[0].text == "42\n"


def test_a_broken_cell_fails_with_its_reason(write_notebook: Write, tmp_path: Path) -> None:
    """Case 22."""
    path = write_notebook("print(n)", "raise RuntimeError('no such luck')")
    with pytest.raises(NotebookFailed, match="RuntimeError: no such luck") as failed:
        run_notebook(path, tmp_path / "out", {})
    assert "\n" not in str(failed.value)


def test_a_cell_that_does_nothing_fails(write_notebook: Write, tmp_path: Path) -> None:
    """Case 22: nbsmoke #42, hopai #44."""
    with pytest.raises(NotebookFailed, match="shows nothing"):
        run_notebook(write_notebook("print(n)", "pass"), tmp_path / "out", {})


def test_kernels_that_start_at_once_in_one_folder_do_not_meet(write_notebook: Write, tmp_path: Path) -> None:
    """As two releases' tests, or two sweeps of one checkout; nor do they leave anything there."""
    path = write_notebook("print(n)")
    code = "import sys; from pathlib import Path; from specdec.notebooks import run_notebook; "
    code += "run_notebook(Path(sys.argv[1]), Path(sys.argv[2]), {'n': int(sys.argv[3])})"
    here = tmp_path / "here"
    here.mkdir()
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(path), str(tmp_path / "out"), str(n)], cwd=here)
        for n in range(3)
    ]
    assert [run.wait(120) for run in runs] == [0, 0, 0]
    for n in range(3):
        executed = nbformat.read(tmp_path / "out" / "notebooks" / f"made__n={n}.ipynb", as_version=4)
        assert executed.cells[-1].outputs[0].text == f"{n}\n"
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("death", ["os.kill(os.getpid(), 9)", "os._exit(0)"])
def test_a_dead_kernel_ends_the_run_within_seconds(death: str, write_notebook: Write, tmp_path: Path) -> None:
    """Case 19: papermill #125, #711. The kernel of `os._exit(0)` even reports success."""
    began_s = time.monotonic()
    with pytest.raises(NotebookFailed, match="its kernel died"):
        run_notebook(write_notebook("print(n)", f"import os, time; {death}; time.sleep(600)"), tmp_path / "out", {})
    assert time.monotonic() - began_s < 60


def test_ctrl_c_ends_the_kernel_too(write_notebook: Write, tmp_path: Path) -> None:
    """Case 17: with the kernel its servers end. As in a terminal: SIGINT to the foreground process group."""
    began = tmp_path / "began"
    path = write_notebook(f"import os, pathlib, time; pathlib.Path({str(began)!r}).touch(); time.sleep(600)")
    code = "import sys; from pathlib import Path; from specdec.notebooks import run_notebook; "
    code += "run_notebook(Path(sys.argv[1]), Path(sys.argv[2]), {})"
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(path), str(tmp_path / "out")],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 120
        while not began.exists():
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        kernels = [process for process in tree_processes(run.pid) if "ipykernel_launcher" in process.cmdline()]
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(30) != 0
    finally:
        run.kill()
    assert len(kernels) == 1
    assert not is_alive(kernels[0])


def test_a_notebook_that_only_claims_to_be_done_is_not_done(write_notebook: Write) -> None:
    notebook = nbformat.read(write_notebook("print(n)"), as_version=4)
    for cell in notebook.cells:
        cell.metadata.papermill = {"status": "completed"}
    with pytest.raises(NotebookFailed, match="was not run"):
        check_executed(notebook, "made")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("concurency", "8"), "unknown parameter concurency; known: profile, workers, concurrency"),
        (("repeats", "three"), "repeats must be an integer of 1 or more, got 'three'"),
    ],
)
def test_papermill_itself_is_refused_before_anything_starts(
    given: tuple[str, str], reason: str, tmp_path: Path
) -> None:
    """Case 20: papermill #245, #545; the notebook refuses what papermill only logs."""
    command = [sys.executable, "-m", "papermill", str(SWEEP), str(tmp_path / "out.ipynb"), "-p", *given]
    run = subprocess.run(
        [*command, "-p", "out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode != 0
    assert reason in run.stderr
    assert not (tmp_path / "run").exists()
