"""Run the notebooks by papermill: parameters checked before anything starts, progress in the terminal, and no
notebook taken as done that was not.
"""

from __future__ import annotations

import ast
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import DeadKernelError
from traitlets.config import Config

from specdec.parameters import refuse_names, smallest_threshold, sweep_run
from specdec.runs.run_folder import Status, folder_lock, open_folder, read_status
from specdec.servers.profile import ROOT

FOLDER = ROOT / "notebooks"
NOTEBOOKS = ("00_worker_path", "01_baseline_vs_eagle3", "02_threshold_sweep", "03_load_ramp", "04_report")
PARAMETERS_TAG = "parameters"
INJECTED_TAG = "injected-parameters"
STATUS_EVERY_S = 20.0
_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
Value = str | int | float | bool
Notebook = Any  # nbformat has no types


class NotebookFailed(Exception):  # noqa: N818 - says what happened
    """A notebook did not run to its end; one line says which cell and why."""


def run_notebook(path: Path, out: Path, parameters: Mapping[str, Value], say: Callable[[str], None] = print) -> Path:
    """Run a notebook with `parameters` into OUT/notebooks; the path of the executed copy.

    Raises ValueError before anything starts for an unknown or ill-typed parameter; NotebookFailed if a cell
    fails, shows nothing, or the kernel dies (seen within seconds).
    """
    check_values(path, parameters)
    import papermill  # takes a second

    target = out / "notebooks" / output_name(path, parameters)
    target.parent.mkdir(parents=True, exist_ok=True)
    cells = nbformat.read(path, as_version=4).cells

    def say_cell(cell: Notebook, cell_index: int) -> None:
        if cell.cell_type == "markdown":
            say(f"  {path.stem}, cell {cell_index + 1} of {len(cells) + 1}: {_first_line(cell.source)}")

    with _status_lines(out, say), _private_sockets() as kernel:
        try:
            papermill.execute_notebook(
                str(path),
                str(target),
                dict(parameters),
                progress_bar=False,
                on_cell_start=say_cell,
                config=kernel,
                extra_arguments=["--log-level=CRITICAL"],  # the kernel's own log; errors of cells are shown
            )
        except papermill.PapermillExecutionError as error:
            reason = f"cell {error.cell_index + 1}: {error.ename}: {_first_line(error.evalue)}"
            raise NotebookFailed(f"{path.stem} failed in {reason} (all of it: {target})") from None
        except DeadKernelError:
            raise NotebookFailed(f"{path.stem}: its kernel died; what it had shown: {target}") from None
    check_executed(nbformat.read(target, as_version=4), path.stem)
    return target


@contextmanager
def _private_sockets() -> Iterator[Config]:
    """Settings of a kernel whose sockets are files in a folder of its own: no port to collide with a server's.

    Without the folder jupyter_client numbers them in the current one, where two kernels that start at once take the
    same names, and one never answers.
    """
    with tempfile.TemporaryDirectory(prefix="specdec-", ignore_cleanup_errors=True) as folder:
        yield Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}})


def run_suite(asked: Mapping[str, Any], say: Callable[[str], None] = print) -> Path:
    """All notebooks, the ramp at the sweep's smallest threshold and across it; the report's HTML page.

    `asked`: parameters of `sweep_run`, None = not given. Raises ValueError before anything starts,
    NotebookFailed if one fails.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    for name, value in given.items():
        if value == 0:  # a notebook's word for "not given"
            raise ValueError(f"{name} must be above 0, got {value}")
    run = sweep_run(**given)
    with folder_lock(run.out):
        open_folder(run.out, run.plan)  # a folder of another plan, or one in use, is refused here
    threshold = smallest_threshold(run.plan.thresholds, run.plan.profile)
    ramp = {"threshold": threshold, "peak": max(run.plan.concurrencies[-1], 2 * threshold)}
    say(str(run))
    return run_all(run.out, {**given, **ramp, "out": str(run.out)}, say)


def run_all(out: Path, parameters: Mapping[str, Value], say: Callable[[str], None] = print) -> Path:
    """Run the notebooks in order, each with those of `parameters` that it declares; the report's HTML page.

    Raises as `run_notebook`; also ValueError for a parameter that no notebook declares.
    """
    declared = {name: parameter_types(FOLDER / f"{name}.ipynb") for name in NOTEBOOKS}
    known = sorted(set().union(*declared.values()))
    refuse_names(sorted(set(parameters) - set(known)), known)
    for name in NOTEBOOKS:
        check_values(FOLDER / f"{name}.ipynb", _declared(parameters, declared[name]))
    for number, name in enumerate(NOTEBOOKS):
        say(f"notebook {number + 1} of {len(NOTEBOOKS)}: {name}")
        executed = run_notebook(FOLDER / f"{name}.ipynb", out, _declared(parameters, declared[name]), say)
    return write_html(executed, out / "report.html")


def parameter_types(path: Path) -> dict[str, type]:
    """The parameters a notebook declares in its tagged cell, with the types of their annotations.

    Plain types only: papermill takes a parameter of another type for an unknown one. Raises ValueError if
    there is not exactly one tagged cell, or a line of it is not "name: type = value".
    """
    cells = nbformat.read(path, as_version=4).cells
    tagged = [cell for cell in cells if PARAMETERS_TAG in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise ValueError(f"{path.name} has {len(tagged)} cells tagged {PARAMETERS_TAG!r}, it needs one")
    types: dict[str, type] = {}
    for line in ast.parse(tagged[0].source).body:
        kind = ast.unparse(line.annotation) if isinstance(line, ast.AnnAssign) else None
        if kind not in _TYPES or not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            wanted = f"name: type = value, with a type of {', '.join(_TYPES)}"
            raise ValueError(f"{path.name}: {ast.unparse(line)!r} is no typed parameter ({wanted})")
        types[line.target.id] = _TYPES[kind]
    return types


def check_values(path: Path, parameters: Mapping[str, Value]) -> None:
    """Raise ValueError, one line, for a parameter that the notebook does not declare or of another type."""
    types = parameter_types(path)
    refuse_names(sorted(set(parameters) - set(types)), list(types))
    for name, value in parameters.items():
        kind = types[name]
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if type(value) is not kind and not (kind is float and is_whole):
            raise ValueError(f"{name} must be {kind.__name__}, got {value!r}")


def check_executed(notebook: Notebook, name: str) -> None:
    """Raise NotebookFailed unless every code cell but the parameters ran, shows something, and shows no
    error.

    A notebook whose kernel died can say that all its cells completed, and a cell can pass that does nothing.
    """
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        where = f"{name}, cell {index + 1} ({_first_line(cell.source)!r})"
        if cell.execution_count is None:
            raise NotebookFailed(f"{where} was not run")
        if any(output.output_type == "error" for output in cell.outputs):
            raise NotebookFailed(f"{where} ended with an error")
        if not cell.outputs and not {PARAMETERS_TAG, INJECTED_TAG} & set(cell.metadata.get("tags", [])):
            raise NotebookFailed(f"{where} shows nothing: a cell that does nothing has no place here")


def output_name(path: Path, parameters: Mapping[str, Value]) -> str:
    """File name of an executed notebook: its own and what it was given, except the folder it lies in."""
    given = [f"{name}={value}" for name, value in parameters.items() if name != "out"]
    return re.sub(r"[^A-Za-z0-9_.,=-]", "-", "__".join([path.stem, *given])) + ".ipynb"


def write_html(notebook: Path, page: Path) -> Path:
    """One page of a notebook's text, tables and figures, without its code; titled with its first line."""
    from nbconvert import HTMLExporter

    content = nbformat.read(notebook, as_version=4)
    content.metadata.title = _first_line(content.cells[0].source)
    exporter = HTMLExporter(exclude_input=True, exclude_input_prompt=True, exclude_output_prompt=True)
    body, _ = exporter.from_notebook_node(content)
    page.write_text(body, encoding="utf-8")
    return page


def refresh_report(path: Path = FOLDER / "04_report.ipynb") -> None:
    """Execute the committed report in place, over the results it names, and keep nothing but its outputs."""
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    check_executed(notebook, path.stem)
    nbformat.write(without_noise(notebook), path)


def without_noise(notebook: Notebook) -> Notebook:
    """The notebook without timings, widget states and the versions of the machine that ran it."""
    language = {"name": "python"}
    notebook.metadata = {"kernelspec": notebook.metadata.kernelspec, "language_info": language}
    for cell in notebook.cells:
        cell.metadata = {"tags": cell.metadata["tags"]} if "tags" in cell.metadata else {}
    return notebook


def _declared(parameters: Mapping[str, Value], types: Mapping[str, object]) -> dict[str, Value]:
    return {name: value for name, value in parameters.items() if name in types}


def _first_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[0].lstrip("# ") if lines else ""


def _status_line(status: Status) -> str:
    parts = [f"{status.cells_done} of {status.cells_total} cells", status.now or "between cells"]
    if status.seconds_left is not None:
        parts.append(f"about {status.seconds_left / 60:.0f} min left")
    if status.last_result is not None:
        parts.append(f"last: {status.last_result}")
    return "; ".join(parts)


@contextmanager
def _status_lines(out: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Say from time to time what the sweep in `out` is doing while a long cell runs."""
    stop = threading.Event()

    def watch() -> None:
        last = None
        while not stop.wait(STATUS_EVERY_S):
            try:
                status = read_status(out)
            except ValueError:
                continue
            if status.state == "running" and (status.cells_done, status.now) != last:
                last = (status.cells_done, status.now)
                say(f"    {_status_line(status)}")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
