"""Notebooks made for the tests, and where the committed ones lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from specdec.servers.profile import ROOT

FOLDER = ROOT / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


@pytest.fixture
def write_notebook(tmp_path: Path) -> Callable[..., Path]:
    """Write a notebook with the parameter `n: int = 1` and the given code cells."""

    def write(*cells: str) -> Path:
        parameters = nbformat.v4.new_code_cell("n: int = 1  # a number", metadata={"tags": ["parameters"]})
        notebook = nbformat.v4.new_notebook(cells=[parameters, *map(nbformat.v4.new_code_cell, cells)])
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        path = tmp_path / "made.ipynb"
        nbformat.write(notebook, path)
        return path

    return write
