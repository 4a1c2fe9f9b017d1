"""The command line. Thin: each command reads its options and calls one function of this package."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

_UsageError: Any = typer.BadParameter.__base__  # what typer raises for options it cannot read; it has no name there

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


Out = Annotated[Path, typer.Argument(help="Folder of the run; the same command goes on with what is missing.")]
Profile = Annotated[str, typer.Option(help="Name in env/profiles, or a .toml file.")]
Workers = Annotated[str | None, typer.Option(help="For example v1,v2.")]
Concurrency = Annotated[str | None, typer.Option(help="Requests in flight, for example 1,8,32.")]
Thresholds = Annotated[
    str | None, typer.Option(help="Largest batch sizes that still speculate, for example 4,8; 0 = never.")
]
Repeats = Annotated[int | None, typer.Option(help="Times each arm is measured at each concurrency.")]
TargetCi = Annotated[
    float | None,
    typer.Option(help="Go on until each 95 % interval is within this share of its mean, for example 0.03 ..."),
]
MaxRepeats = Annotated[int | None, typer.Option(help="... or this many repeats are done.")]
SloTtftMs = Annotated[float | None, typer.Option(help="Goodput: time to first token allowed, ms.")]
SloTpotMs = Annotated[float | None, typer.Option(help="Goodput: time per output token allowed, ms.")]


@app.callback()
def specdec() -> None:
    """Speculation that switches itself off under load in SGLang, and measurements of what that is worth."""


@app.command()
def sweep(
    out: Out,
    profile: Profile = "cpu-tiny",
    workers: Workers = None,
    concurrency: Concurrency = None,
    thresholds: Thresholds = None,
    repeats: Repeats = None,
    target_ci: TargetCi = None,
    max_repeats: MaxRepeats = None,
    output_tokens: Annotated[int | None, typer.Option(help="Output tokens per request.")] = None,
    slo_ttft_ms: SloTtftMs = None,
    slo_tpot_ms: SloTpotMs = None,
    seed: Annotated[int, typer.Option(help="Turns the order of arms and the choice of prompts.")] = 0,
    retry_failed: Annotated[bool, typer.Option(help="Measure failed cells of an earlier call anew.")] = False,
    ray: Annotated[
        str | None, typer.Option(help="Measure on this Ray cluster: HOST:PORT of its head, or auto.", metavar="ADDRESS")
    ] = None,
) -> None:
    """Measure baseline, static and dynamic speculation over a grid of concurrencies into OUT."""
    from specdec.parameters import integers, names
    from specdec.runs.plan import make_plan
    from specdec.runs.ray_sweep import run_ray_sweep
    from specdec.runs.sweep import run_sweep  # pandas and SGLang take seconds to import
    from specdec.worker_path import installed_release

    plan = make_plan(
        profile,
        sglang=installed_release(),
        workers=names("workers", workers or ""),
        concurrencies=integers("concurrency", concurrency or ""),
        thresholds=integers("thresholds", thresholds or ""),
        repeats=repeats,
        target_ci=target_ci,
        max_repeats=max_repeats,
        output_tokens=output_tokens,
        slo_ttft_ms=slo_ttft_ms,
        slo_tpot_ms=slo_tpot_ms,
        seed=seed,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: servers stopped, rows kept
    try:
        if ray is None:
            results = run_sweep(plan, out, retry_failed=retry_failed)
        else:
            results = run_ray_sweep(plan, out, ray, retry_failed=retry_failed)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; what is measured is kept in {out}, the same command goes on", err=True)
        raise typer.Exit(130) from None
    except OSError as error:
        typer.echo(f"stopped: {error}; what is measured is kept in {out}, the same command goes on", err=True)
        raise typer.Exit(1) from None
    failed = int(results["error"].notna().sum())
    typer.echo(f"{len(results)} cells in {out / 'results.parquet'}, {failed} failed")
    if failed:
        typer.echo(f"why: column error, and {out / 'logs'}; --retry-failed measures them anew", err=True)
        raise typer.Exit(1)


@app.command()
def status(out: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Say what the run in OUT is doing."""
    from specdec.runs.run_folder import read_status

    run = read_status(out)
    typer.echo(f"{out}: {run.state}, {run.cells_done} of {run.cells_total} cells, {run.cells_failed} failed")
    if run.state == "running":
        left = "unknown" if run.seconds_left is None else f"about {run.seconds_left / 60:.0f} min"
        typer.echo(f"now: {run.now or 'between cells'} (process {run.pid}); left: {left}")
    elif run.state != "done":
        typer.echo("what is measured is kept; the same command goes on")
    if run.last_result:
        typer.echo(f"last: {run.last_result} at {run.updated_at}")


@app.command()
def run(
    profile: Profile = "cpu-tiny",
    workers: Workers = None,
    concurrency: Concurrency = None,
    thresholds: Thresholds = None,
    repeats: Repeats = None,
    target_ci: TargetCi = None,
    max_repeats: MaxRepeats = None,
    slo_ttft_ms: SloTtftMs = None,
    slo_tpot_ms: SloTpotMs = None,
    out: Annotated[str, typer.Option(help="Folder of the run, as for specdec sweep.")] = "results/run",
) -> None:
    """Run notebooks 00 to 04 into OUT: worker path, sweep, figures, load ramp, and the report as a page."""
    from specdec.notebooks import NotebookFailed, run_suite
    from specdec.runs.results import read_results

    asked = {
        **{"profile": profile, "workers": workers, "concurrency": concurrency, "thresholds": thresholds},
        **{"repeats": repeats, "target_ci": target_ci, "max_repeats": max_repeats},
        **{"slo_ttft_ms": slo_ttft_ms, "slo_tpot_ms": slo_tpot_ms, "out": out},
    }
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        page = run_suite(asked, typer.echo)
    except NotebookFailed as error:
        typer.echo(f"specdec: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo(f"interrupted; what is measured is kept in {out}, the same command goes on", err=True)
        raise typer.Exit(130) from None
    typer.echo(f"report: {page}")
    if failed := int(read_results(page.parent)["error"].notna().sum()):
        again = f"specdec sweep {page.parent} --retry-failed with the same options measures them anew"
        typer.echo(f"{failed} cells failed; why: at the report's end; {again}", err=True)
        raise typer.Exit(1)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="Folder of the run to compare with.")],
    b: Annotated[Path, typer.Argument(help="Folder of the run in question.")],
    output: Annotated[str, typer.Option("--format", help="text, markdown or json.")] = "text",
) -> None:
    """Hold run B against run A, cell by cell; exit code 1 if B is worse or fails somewhere."""
    from specdec.analysis.compare import FORMATS, compare_runs
    from specdec.runs.results import read_results

    if output not in FORMATS:
        raise ValueError(f"--format must be {', '.join(FORMATS)}, got {output!r}")
    report = compare_runs(read_results(a), read_results(b), a.name, b.name)
    typer.echo(FORMATS[output](report))
    raise typer.Exit(report.exit_code)


@app.command()
def doctor(
    flags: Annotated[list[str] | None, typer.Argument(help="After --: the flags of sglang.launch_server.")] = None,
    url: Annotated[
        str | None, typer.Option(help="A running server to hold the prediction against, instead of flags.")
    ] = None,
    sglang: Annotated[str | None, typer.Option(help="SGLang release; default: the installed one.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Requests in flight, to warn about what caps them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Say which worker SGLang runs, why, and whether the switch can act there; exit code 1 if it cannot."""
    import json
    import os

    from specdec import worker_path

    if url is not None and (flags or sglang or concurrency):
        raise ValueError("--url goes without server flags, --sglang and --concurrency: the server says it all")
    if url is not None:
        check = worker_path.check_live(url)
        data, text, acts = check.to_dict(), worker_path.render_live(check), check.switch_acts
    else:
        release = sglang or worker_path.installed_release()
        path = worker_path.predict(flags or [], os.environ, release, concurrency)
        data, text, acts = path.to_dict(), worker_path.render(path), path.switch_acts
    typer.echo(json.dumps(data, indent=2) if as_json else text)
    if not acts:
        raise typer.Exit(1)


@app.command()
def threshold(
    value: Annotated[str, typer.Argument(help="Largest batch size that speculates; 0: never, none: always.")],
    url: Annotated[str, typer.Option(help="The running server, for example http://127.0.0.1:30000.")],
    resume: Annotated[int | None, typer.Option(help="Speculation comes back at this batch size.")] = None,
    dwell: Annotated[int | None, typer.Option(help="Decode steps that a mode is kept at least.")] = None,
) -> None:
    """Change the threshold of a running server."""
    from specdec.policy import SwitchSettings
    from specdec.servers.client import ServerClient

    try:
        number = None if value == "none" else int(value)
    except ValueError:
        raise ValueError(f"the threshold must be an integer or none, got {value!r}") from None
    SwitchSettings(number, resume, 1 if dwell is None else dwell)  # refuses what the server would refuse
    client = ServerClient(url)
    try:
        client.set_threshold(number, resume, dwell)
        state = client.state() or {}
    except ConnectionError as error:
        typer.echo(f"specdec: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(
        f"threshold {state['threshold']}, resume threshold {state['resume_threshold']}, "
        f"dwell {state['dwell_steps']} steps"
    )


@app.command("self-check")
def self_check_command(
    profile: Profile = "cpu-tiny",
) -> None:
    """Check the switch on this machine: tokens, graphs, what off and on cost. A verdict per line."""
    from specdec.runs.self_check import self_check
    from specdec.servers.profile import load_profile
    from specdec.worker_path import installed_release

    verdicts = self_check(load_profile(profile), installed_release(), typer.echo)
    raise typer.Exit(0 if all(verdict.ok for verdict in verdicts) else 1)


def main() -> None:
    """Entry point: bad input is one line on stderr and exit code 2."""
    try:
        sys.exit(app(prog_name="specdec", standalone_mode=False))
    except _UsageError as error:
        reason = f"{error.format_message().rstrip('.')}; see: {error.ctx.command_path} --help"
    except ValueError as error:
        reason = str(error)
    print(f"specdec: {reason}", file=sys.stderr)
    sys.exit(2)
