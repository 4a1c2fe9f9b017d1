"""The figures of load ramps, one per worker."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.figure import Figure

from specdec.figure_style import Provenance
from specdec.load_ramp import MeasuredRamp, RampFacts
from specdec.plots import accept_length_around_switches, mode_timeline
from specdec.step_trace import around_switches


def timelines(ramps: Iterable[MeasuredRamp]) -> dict[str, Figure]:
    """Batch size, mode and tok/s over time, by worker."""
    return {
        ramp.facts.worker: mode_timeline(ramp.trace, ramp.facts.threshold, ramp.facts.worker, _about(ramp.facts))
        for ramp in ramps
    }


def recoveries(ramps: Iterable[MeasuredRamp]) -> dict[str, Figure]:
    """Accept length around switches, by worker."""
    return {
        ramp.facts.worker: accept_length_around_switches(
            around_switches(ramp.trace), ramp.facts.worker, _about(ramp.facts)
        )
        for ramp in ramps
    }


def _about(facts: RampFacts) -> Provenance:
    return Provenance("n = 1 ramp", facts.model, facts.profile, facts.sglang, facts.machine)
