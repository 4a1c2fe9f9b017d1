"""The parameters of the notebooks and of `specdec run`: refused in one line, or made into a plan.

Papermill only logs a name that a notebook does not declare and takes any type. Each notebook therefore
calls one of the functions here in its first cell after the parameters.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.load.lengths import parse_lengths
from specdec.load.shapes import LengthsAsked, Load, make_load, refuse_too_long
from specdec.runs.plan import SweepPlan, make_plan
from specdec.servers.profile import ROOT, Profile
from specdec.worker_path import installed_release

INJECTED = "# Parameters"
"""First line of the cell in which papermill puts what it was given."""
Integers = str | int | Sequence[int]


@dataclass(frozen=True)
class SweepRun:
    """What notebooks 01 and 02 measure, and where it goes."""

    plan: SweepPlan
    out: Path

    def __str__(self) -> str:
        plan = self.plan
        arms = ", ".join(arm.name for arm in plan.arms())
        cells = len(plan.arms()) * len(plan.concurrencies) * plan.repeats
        further = "" if plan.target_ci is None else f", up to {plan.max_repeats} until +-{plan.target_ci:g} is reached"
        return (
            f"profile {plan.profile.name}, SGLang {plan.sglang}, into {shown(self.out)}\n"
            f"arms: {arms}\nconcurrencies: {', '.join(map(str, plan.concurrencies))}\n"
            f"{plan.repeats} repeats: {cells} cells{further}"
        )


@dataclass(frozen=True)
class RampRun:
    """What notebook 03 runs on each worker, and where it goes."""

    plan: SweepPlan
    out: Path
    threshold: int  # requests in a decode step
    load: Load

    def __str__(self) -> str:
        return (
            f"profile {self.plan.profile.name}, SGLang {self.plan.sglang}, into {shown(self.out)}\n"
            f"workers {', '.join(self.plan.workers)}, threshold {self.threshold}\n{self.load}"
        )


def sweep_run(
    *,
    profile: str,
    workers: str = "",
    concurrency: Integers = "",
    thresholds: Integers = "",
    repeats: int = 0,
    target_ci: float = 0.0,
    max_repeats: int = 0,
    slo_ttft_ms: float = 0.0,
    slo_tpot_ms: float = 0.0,
    out: str,
) -> SweepRun:
    """The sweep that these parameters ask for, on this environment's SGLang.

    `workers`, `concurrency`, `thresholds`: comma-separated, for example "v1,v2", "1,8,32", "4,8"; empty, or 0
    for `repeats` = as the profile says. `target_ci`: go on until each 95 % interval is within this share of
    its mean, up to `max_repeats`; 0 = `repeats` alone decides. SLOs in ms, 0 = none. Raises ValueError in one
    line; nothing is started.
    """
    refuse_unknown(*inspect.signature(sweep_run).parameters)
    plan = make_plan(
        _text("profile", profile),
        sglang=installed_release(),
        workers=names("workers", workers),
        concurrencies=integers("concurrency", concurrency),
        thresholds=integers("thresholds", thresholds),
        repeats=repeats or None,
        target_ci=target_ci or None,
        max_repeats=max_repeats or None,
        slo_ttft_ms=slo_ttft_ms or None,
        slo_tpot_ms=slo_tpot_ms or None,
    )
    return SweepRun(plan, run_folder(out))


def ramp_run(
    *,
    profile: str,
    workers: str = "",
    threshold: int = 0,
    load: str = "ramp",
    peak: int = 0,
    phase_s: float = 3.0,
    input_tokens: str | int = "",
    output_tokens: str | int = "",
    slo_ttft_ms: float = 0.0,
    slo_tpot_ms: float = 0.0,
    seed: int = 0,
    out: str,
) -> RampRun:
    """The ramp, or other load (load/shapes.py), that these parameters ask for.

    `threshold` 0: the profile's smallest; `peak` 0: its largest concurrency; empty lengths: prompts as they
    stand in their file, output tokens as the profile says. SLOs in ms, 0 = none. Raises ValueError in one
    line; nothing is started.
    """
    refuse_unknown(*inspect.signature(ramp_run).parameters)
    plan = make_plan(
        _text("profile", profile),
        sglang=installed_release(),
        workers=names("workers", workers),
        repeats=1,
        slo_ttft_ms=slo_ttft_ms or None,
        slo_tpot_ms=slo_tpot_ms or None,
        seed=seed,
    )
    for name, value in (("threshold", threshold), ("peak", peak)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} must be an integer of 0 or more, got {value!r}")
    if isinstance(phase_s, bool) or not isinstance(phase_s, (int, float)) or not 1 <= phase_s <= 3600:
        raise ValueError(f"phase_s must be a number of seconds from 1 to 3600, got {phase_s!r}")
    threshold = threshold or smallest_threshold((), plan.profile)
    load = _text("load", load)
    _refuse_unused(load, peak, input_tokens, output_tokens)
    lengths = LengthsAsked(
        input=None if input_tokens == "" else parse_lengths("input_tokens", str(input_tokens)),
        output=parse_lengths("output_tokens", str(plan.output_tokens if output_tokens == "" else output_tokens)),
    )
    made = make_load(load, threshold, peak or plan.concurrencies[-1], float(phase_s), lengths, seed)
    refuse_too_long(made, [*plan.profile.flags, *plan.profile.release(plan.sglang).flags])
    return RampRun(plan, run_folder(out), threshold, made)


def smallest_threshold(asked: Sequence[int], profile: Profile) -> int:
    """The smallest threshold above 0 of those asked for, else of the profile's grid. ValueError if there is none."""
    for thresholds in (asked, profile.grid.thresholds):
        if above := [n for n in thresholds if n > 0]:
            return min(above)
    raise ValueError(f"a load ramp needs a threshold above 0; profile {profile.name} has none in its grid")


def _refuse_unused(load: str, peak: int, input_tokens: str | int, output_tokens: str | int) -> None:
    """Raise ValueError for a parameter that this load would not use."""
    if peak and load != "ramp":
        raise ValueError(f"peak belongs to load 'ramp', not to {load!r}: leave it 0")
    if (input_tokens or output_tokens) and load.startswith("trace:"):
        raise ValueError("a trace says its lengths itself: leave input_tokens and output_tokens empty")


def path_run(*, profile: str, workers: str, out: str) -> SweepRun:
    """What notebook 00 looks at: the workers of a profile. Raises ValueError in one line."""
    refuse_unknown("profile", "workers", "out")
    plan = make_plan(_text("profile", profile), sglang=installed_release(), workers=names("workers", workers))
    return SweepRun(plan, run_folder(out))


def report_folder(*, out: str) -> Path:
    """The run folder that notebook 04 reads. Raises ValueError in one line if it is none."""
    refuse_unknown("out")
    folder = run_folder(out)
    if not folder.is_dir():
        raise ValueError(f"out: there is no run folder {shown(folder)}")
    return folder


def names(name: str, text: str) -> list[str] | None:
    """ "v1,v2" as a list; None if nothing is given. Raises ValueError."""
    if text == "":
        return None
    return [part.strip() for part in _text(name, text).split(",")]


def integers(name: str, given: Integers) -> list[int] | None:
    """8, "1,8,32" or [1, 8, 32] as a list; None for an empty text. Raises ValueError."""
    if given == "":
        return None
    try:
        parts = given.split(",") if isinstance(given, str) else [given] if isinstance(given, int) else list(given)
        if any(isinstance(part, (bool, float)) for part in parts):
            raise ValueError
        return [int(part) for part in parts]
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be integers separated by commas, got {given!r}") from None


def run_folder(out: str) -> Path:
    """`out` as a path; a relative one starts at the repository, wherever the notebook is run. Raises
    ValueError.
    """
    return (ROOT / _text("out", out)).resolve()


def shown(path: Path) -> str:
    """A path as outputs show it: from the repository on, so that no machine's folders get into a notebook."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def refuse_unknown(*declared: str) -> None:
    """Refuse a parameter that papermill injected and the notebook does not declare.

    Papermill puts what it was given into a cell of its own; it is found among the cells run so far. Outside
    a notebook there is nothing to look at. Raises ValueError in one line.
    """
    for cell in _cells_run():
        if cell.startswith(INJECTED):
            refuse_names(sorted(assigned_names(cell) - set(declared)), declared)


def refuse_names(unknown: Sequence[str], declared: Sequence[str]) -> None:
    """Raise ValueError if there are unknown names."""
    if unknown:
        raise ValueError(f"unknown parameter {', '.join(unknown)}; known: {', '.join(declared)}")


def assigned_names(source: str) -> set[str]:
    """The names a cell assigns to."""
    targets: list[ast.expr] = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign):
            targets += statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets.append(statement.target)
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _cells_run() -> list[str]:
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return []
    shell = get_ipython()
    return [] if shell is None else [str(cell) for cell in shell.user_ns.get("In", [])]


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a text, got {value!r}")
    return value.strip()
