"""The committed notebooks: a question, typed parameters, thin cells, no noise, no machine's paths."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from specdec.notebooks import NOTEBOOKS, parameter_types, without_noise

FOLDER = Path(__file__).parents[2] / "notebooks"
WITH_OUTPUTS = "04_report"  # over committed results
LINES_OF_CODE = 20


def _read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def _code(name: str) -> list[Any]:
    return [cell for cell in _read(name).cells if cell.cell_type == "code"]


def test_the_notebooks_are_those_that_are_run() -> None:
    assert tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb"))) == NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_first_cell_says_which_question_it_answers(name: str) -> None:
    first = _read(name).cells[0]
    assert first.cell_type == "markdown"
    title = first.source.splitlines()[0]
    assert title.startswith("# ")
    assert title.endswith("?")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_first_code_cell_is_the_typed_and_explained_parameters(name: str) -> None:
    first = _code(name)[0]
    assert first.metadata.tags == ["parameters"]
    types = parameter_types(FOLDER / f"{name}.ipynb")
    lines = first.source.splitlines()
    assert len(lines) == len(types)
    assert all("  # " in line for line in lines)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_second_code_cell_checks_all_parameters(name: str) -> None:
    """Papermill alone would take an unknown name in silence."""
    calls = [node for node in ast.walk(ast.parse(_code(name)[1].source)) if isinstance(node, ast.Call)]
    checks = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id.endswith(("_run", "_folder"))]
    assert len(checks) == 1
    assert {keyword.arg for keyword in checks[0].keywords} == set(parameter_types(FOLDER / f"{name}.ipynb"))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_cells_are_calls_without_logic(name: str) -> None:
    plain = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Expr)
    for cell in _code(name):
        statements = ast.parse(cell.source)
        assert all(isinstance(statement, plain) for statement in statements.body)
        assert not [node for node in ast.walk(statements) if isinstance(node, (ast.comprehension, ast.Lambda))]
        assert len(cell.source.splitlines()) <= LINES_OF_CODE


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_name_imported_is_used(name: str) -> None:
    source = "\n".join(cell.source for cell in _code(name))
    imported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    assert imported <= used


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_committed_without_noise(name: str) -> None:
    notebook = _read(name)
    assert notebook == without_noise(_read(name))
    assert notebook.metadata.kernelspec.name == "python3"
    if name != WITH_OUTPUTS:
        assert not any(cell.outputs or cell.execution_count for cell in _code(name))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_no_paths_of_a_machine(name: str) -> None:
    notebook = _read(name)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/png", None)
    found = re.findall(r"(?:/home|/root|/tmp|/work|/Users|/mnt|[A-Z]:\\)[/\w.-]*", json.dumps(notebook))
    assert found == []


def test_both_sweep_notebooks_ask_for_the_same() -> None:
    """02 finds the cells done that 01 measured only if they plan alike."""
    first, second = (_code(name) for name in NOTEBOOKS[1:3])
    assert first[0].source == second[0].source
    assert first[1].source == second[1].source
