"""Parameters of notebooks and of `specdec run`: refused in one line before anything starts.

Case 20: papermill #245, #545 took a wrong name or type in silence.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
import papermill
import pytest
from typer.testing import CliRunner

import specdec.notebooks
from specdec.cli import app, main
from specdec.load.shapes import ClosedLoad, phases_across
from specdec.notebooks import NOTEBOOKS, check_values, output_name, parameter_types, run_all, run_suite
from specdec.parameters import (
    INJECTED,
    assigned_names,
    integers,
    names,
    ramp_run,
    refuse_unknown,
    report_folder,
    run_folder,
    smallest_threshold,
    sweep_run,
)
from specdec.servers.profile import ROOT, load_profile

NOTEBOOK = ROOT / "notebooks" / "02_threshold_sweep.ipynb"
SWEEP = {
    "profile": "cpu-tiny",
    "workers": "",
    "concurrency": "1,4",
    "thresholds": "2",
    "repeats": 1,
    "out": "results/none",
}
RAMP = {
    "profile": "cpu-tiny",
    "workers": "v1",
    "threshold": 4,
    "peak": 16,
    "phase_s": 2.0,
    "out": "results/none",
}


def asked(out: Path, **given: object) -> dict[str, object]:
    """What the command line hands over; None where it was not told."""
    return {"profile": "cpu-tiny", "workers": "v1", "repeats": 1, "target_ci": None, "out": str(out), **given}


@pytest.fixture(autouse=True)
def _release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.parameters.installed_release", lambda: "0.5.12")


@pytest.mark.parametrize(("given", "expected"), [("", None), (8, [8]), ("1,8, 32", [1, 8, 32]), ([1, 2], [1, 2])])
def test_integers_as_papermill_and_people_give_them(given: object, expected: object) -> None:
    assert integers("thresholds", given) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [" ", None, "1,,2", "1;2", "1.5", [1.5], True, [True]])
def test_what_is_no_list_of_integers_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match="thresholds must be integers separated by commas"):
        integers("thresholds", given)  # type: ignore[arg-type]


def test_names_are_split_at_commas() -> None:
    assert names("workers", "v1, v2") == ["v1", "v2"]
    assert names("workers", "") is None


def test_a_sweep_gets_what_was_asked() -> None:
    run = sweep_run(**SWEEP)  # type: ignore[arg-type]
    assert run.plan.concurrencies == (1, 4)
    assert run.plan.thresholds == (2,)
    assert run.out == ROOT / "results" / "none"
    assert not run.out.exists()
    assert "10 cells" in str(run)
    assert (run.plan.target_ci, run.plan.max_repeats, run.plan.slo_tpot_ms) == (None, 1, None)
    surer = sweep_run(**SWEEP, target_ci=0.03, max_repeats=9, slo_ttft_ms=200, slo_tpot_ms=20)  # type: ignore[arg-type]
    assert (surer.plan.target_ci, surer.plan.max_repeats) == (0.03, 9)
    assert (surer.plan.slo_ttft_ms, surer.plan.slo_tpot_ms) == (200, 20)
    assert "up to 9 until +-0.03" in str(surer)
    assert str(ROOT) not in str(run)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("profile", "nope", "no profile 'nope'; known: cpu-tiny"),
        ("profile", 7, "profile must be a text"),
        ("workers", "v9", "no worker 'v9'"),
        ("thresholds", "-1", "thresholds must be integers of 0 or more, got -1"),
        ("concurrency", "0", "concurrencies must be integers of 1 or more, got 0"),
        ("concurrency", "1,1", "twice"),
        ("repeats", -1, "repeats must be an integer of 1 or more"),
        ("repeats", "3", "repeats must be an integer"),
        ("max_repeats", 3, "max_repeats needs a target_ci"),
        ("target_ci", -0.1, "target_ci must be a number above 0"),
        ("slo_ttft_ms", "fast", "slo_ttft_ms must be a number above 0"),
        ("out", "", "out must be a text"),
    ],
)
def test_a_bad_sweep_is_one_line(name: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=r".+") as error:
        sweep_run(**{**SWEEP, name: value})  # type: ignore[arg-type]
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("peak", 4, "does not cross threshold 4"),
        ("threshold", -1, "threshold must be an integer of 0 or more, got -1"),
        ("threshold", 2.5, "threshold must be an integer"),
        ("phase_s", "5", "phase_s must be a number of seconds"),
        ("phase_s", float("nan"), "phase_s must be a number of seconds"),
    ],
)
def test_a_bad_ramp_is_one_line(name: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=r".+") as error:
        ramp_run(**{**RAMP, name: value})  # type: ignore[arg-type]
    assert words in str(error.value)


def test_lengths_may_come_as_numbers() -> None:
    """Papermill makes an integer of `-p input_tokens 64`."""
    run = ramp_run(**{**RAMP, "load": "poisson:4", "peak": 0, "input_tokens": 64})  # type: ignore[arg-type]
    assert all(size.input_tokens == 64 for size in run.load.sizes)


def test_a_ramp_takes_threshold_and_peak_from_the_profile() -> None:
    run = ramp_run(**{**RAMP, "threshold": 0, "peak": 0})  # type: ignore[arg-type]
    assert run.threshold == min(run.plan.profile.grid.thresholds)
    assert isinstance(run.load, ClosedLoad)
    assert max(run.load.concurrencies) == max(run.plan.profile.grid.concurrencies)


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no run folder"):
        report_folder(out=str(tmp_path / "none"))


def test_a_relative_folder_starts_at_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # as a kernel in notebooks/ would be elsewhere
    assert run_folder("results/run") == ROOT / "results" / "run"
    assert run_folder(str(tmp_path)) == tmp_path


def test_a_name_that_papermill_injected_and_nobody_declares_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cells = ["profile: str = 'cpu-tiny'", f'{INJECTED}\nprofile = "cpu-tiny"\nconcurency = 8\n']
    monkeypatch.setattr("specdec.parameters._cells_run", lambda: cells)
    with pytest.raises(ValueError, match="unknown parameter concurency; known: profile, concurrency"):
        refuse_unknown("profile", "concurrency")
    refuse_unknown("profile", "concurency")


def test_assigned_names_of_a_cell() -> None:
    assert assigned_names("a = 1\nb: int = 2\nc == 3\nd.e = 4\nprint(f)") == {"a", "b"}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_parameter_is_typed(name: str) -> None:
    types = parameter_types(ROOT / "notebooks" / f"{name}.ipynb")
    assert types["out"] is str
    known_to_papermill = papermill.inspect_notebook(str(ROOT / "notebooks" / f"{name}.ipynb"))
    assert set(known_to_papermill) == set(types)


def test_values_are_held_against_the_notebooks_types() -> None:
    check_values(NOTEBOOK, {"profile": "cpu-tiny", "concurrency": "8", "repeats": 2})
    check_values(NOTEBOOK.with_name("03_load_ramp.ipynb"), {"phase_s": 5})  # an int is a float
    for name, value, words in [
        ("repeat", 3, "unknown parameter repeat; known: profile, workers, concurrency"),
        ("repeats", "3", "repeats must be int, got '3'"),
        ("repeats", True, "repeats must be int, got True"),
        ("profile", None, "profile must be str, got None"),
        ("concurrency", 8, "concurrency must be str, got 8"),
    ]:
        with pytest.raises(ValueError, match=r".+") as error:
            check_values(NOTEBOOK, {name: value})
        assert words in str(error.value)


def _notebook(path: Path, *tagged: str) -> Path:
    cells = [nbformat.v4.new_code_cell(source, metadata={"tags": ["parameters"]}) for source in tagged]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


@pytest.mark.parametrize(
    ("tagged", "words"),
    [
        ([], "has 0 cells tagged"),
        (["a: int = 1", "b: int = 2"], "has 2 cells tagged"),
        (["a = 1"], "'a = 1' is no typed parameter"),
        (["a: list = []"], "with a type of str, int, float, bool"),
        (["a: int | None = 1"], "with a type of str, int, float, bool"),
    ],
)
def test_a_notebook_without_typed_parameters_is_refused(tagged: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r".+") as error:
        parameter_types(_notebook(tmp_path / "bad.ipynb", *tagged))
    assert words in str(error.value)


def test_run_all_refuses_what_no_notebook_declares_before_it_runs_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(specdec.notebooks, "run_notebook", lambda *_: pytest.fail("started"))
    with pytest.raises(ValueError, match="unknown parameter concurrencies"):
        run_all(tmp_path, {"concurrencies": "1"})
    with pytest.raises(ValueError, match="repeats must be int"):
        run_all(tmp_path, {"repeats": "1"})


def test_run_suite_hands_each_notebook_its_parameters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs: dict[str, dict[str, object]] = {}

    def run_notebook(path: Path, out: Path, parameters: dict[str, object], say: object) -> Path:
        runs[path.stem] = parameters
        return path

    monkeypatch.setattr(specdec.notebooks, "run_notebook", run_notebook)
    monkeypatch.setattr(specdec.notebooks, "write_html", lambda notebook, page: page)
    page = run_suite(asked(tmp_path, concurrency="1,4", thresholds="2"), lambda _: None)
    assert page == tmp_path / "report.html"
    assert tuple(runs) == NOTEBOOKS
    assert runs["01_baseline_vs_eagle3"] == runs["02_threshold_sweep"]
    assert runs["02_threshold_sweep"]["concurrency"] == "1,4"
    ramp = runs["03_load_ramp"]
    assert (ramp["threshold"], ramp["peak"]) == (2, 4)
    assert runs["04_report"] == {"out": str(tmp_path)}


def test_a_ramp_crosses_a_threshold_above_the_grid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(specdec.notebooks, "run_all", lambda out, parameters, say: seen.update(parameters))
    run_suite(asked(tmp_path, concurrency="1", thresholds="0"), lambda _: None)
    assert isinstance(seen["peak"], int)
    assert seen["peak"] > seen["threshold"] >= 1  # type: ignore[operator]


def test_the_ramp_takes_the_smallest_threshold_of_the_sweep_even_above_the_profile_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(specdec.notebooks, "run_all", lambda out, parameters, say: seen.update(parameters))
    run_suite(asked(tmp_path, concurrency="1", thresholds="0,8,16"), lambda _: None)
    assert seen["threshold"] == 8


def test_a_ramp_without_any_threshold_is_refused() -> None:
    profile = load_profile("cpu-tiny")
    grid = profile.grid.model_copy(update={"thresholds": (0,)})
    with pytest.raises(ValueError, match="needs a threshold above 0; profile cpu-tiny has none"):
        smallest_threshold([0], profile.model_copy(update={"grid": grid}))


def test_another_plan_in_the_folder_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(specdec.notebooks, "run_all", lambda *_: None)
    run_suite(asked(tmp_path, concurrency="1,4", thresholds="2"), lambda _: None)
    with pytest.raises(ValueError, match="another plan"):
        run_suite(asked(tmp_path, concurrency="1,8", thresholds="2"), lambda _: None)


def test_outputs_are_named_by_notebook_and_parameters() -> None:
    given = {"profile": "cpu-tiny", "concurrency": "1,4", "repeats": 1, "out": "/tmp/x"}
    assert output_name(NOTEBOOK, given) == ("02_threshold_sweep__profile=cpu-tiny__concurrency=1,4__repeats=1.ipynb")
    assert "/" not in output_name(NOTEBOOK, {"profile": "/a path/x.toml"})


@pytest.mark.parametrize(
    "options",
    [
        ["--thresholds=-1"],
        ["--profile", "nope"],
        ["--concurrency", "1,x"],
        ["--repeats", "0"],
        ["--target-ci", "0"],
        ["--max-repeats", "9"],
        ["--workers", "v7"],
        ["--out", ""],
    ],
)
def test_specdec_run_ends_with_2_and_one_line(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(specdec.notebooks, "run_all", lambda *_: pytest.fail("started"))
    monkeypatch.setattr("sys.argv", ["specdec", "run", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("specdec: ")


def test_specdec_run_refuses_an_unknown_option() -> None:
    assert CliRunner().invoke(app, ["run", "--concurrencies", "1"]).exit_code == 2


def test_a_ramp_crosses_its_threshold_twice_in_each_direction() -> None:
    assert phases_across(4, 16) == (1, 4, 8, 16, 8, 4, 1, 4, 8, 16, 8, 4, 1)
    assert phases_across(1, 2) == (1, 2, 1, 2, 1)
