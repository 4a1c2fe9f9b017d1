"""nbval holds the committed report against a fresh run over the reference results, and notices what it must."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from specdec.notebooks import check_executed, write_html
from specdec.servers.profile import ROOT

REPORT = ROOT / "notebooks" / "04_report.ipynb"
SANITIZE = Path(__file__).with_name("sanitize.cfg")
CELL_TIMEOUT_S = 120  # nbval does not notice a dead kernel: it would wait 2000 s


def _nbval(notebook: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval", str(notebook)]
    command += ["--nbval-current-env", f"--nbval-cell-timeout={CELL_TIMEOUT_S}"]
    command += ["--nbval-sanitize-with", str(SANITIZE), "--rootdir", str(notebook.parent)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, cwd=notebook.parent)


@pytest.fixture
def changed_report(tmp_path: Path) -> Callable[[Callable[[Any], None]], Path]:
    """The committed report with one change, in a folder of its own."""

    def change(edit: Callable[[Any], None]) -> Path:
        notebook = nbformat.read(REPORT, as_version=4)
        edit(notebook)
        path = tmp_path / REPORT.name
        nbformat.write(notebook, path)
        return path

    return change


def _cell(notebook: Any, words: str) -> Any:
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and words in cell.source]
    return cell


def test_the_committed_report_is_complete() -> None:
    check_executed(nbformat.read(REPORT, as_version=4), REPORT.stem)


def test_the_committed_report_equals_a_fresh_run() -> None:
    """Case 21: what is compared is meant; sanitize.cfg says what is not."""
    run = _nbval(REPORT)
    assert run.returncode == 0, run.stdout[-4000:]


def test_a_stale_number_fails(changed_report: Callable[..., Path]) -> None:
    """Case 22: hopai #44; committed outputs that no longer follow from the results."""

    def make_stale(notebook: Any) -> None:
        output = _cell(notebook, "show(throughput(results))").outputs[0]
        text = output["data"]["text/plain"]
        output["data"]["text/plain"] = re.sub(r"\((\d+), ([\d.]+)\)", r"(\1, 9\2)", text, count=1)
        assert output["data"]["text/plain"] != text

    run = _nbval(changed_report(make_stale))
    assert run.returncode == 1
    assert "1 failed" in run.stdout


def test_a_broken_cell_fails(changed_report: Callable[..., Path]) -> None:
    """Case 22."""

    def break_cell(notebook: Any) -> None:
        _cell(notebook, "show(gain_map(results))").source = "show(gain_map(result))"

    run = _nbval(changed_report(break_cell))
    assert run.returncode == 1
    assert "NameError" in run.stdout


def test_a_cell_that_does_nothing_fails(changed_report: Callable[..., Path]) -> None:
    """Case 22: nbsmoke #42."""

    def empty_cell(notebook: Any) -> None:
        _cell(notebook, "show(gain_map(results))").source = "pass"

    run = _nbval(changed_report(empty_cell))
    assert run.returncode == 1
    assert "1 failed" in run.stdout


def test_the_page_holds_figures_and_no_code(tmp_path: Path) -> None:
    page = write_html(REPORT, tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") >= 5
    assert "show(throughput(results))" not in page
    assert "Throughput" in page
    assert "<title>What did this run measure, and what follows from it?</title>" in page
