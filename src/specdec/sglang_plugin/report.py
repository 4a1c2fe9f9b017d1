"""What a server says of its decode steps: counters without a device sync, the server's info, metrics, a step trace."""

import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TextIO

from specdec import __version__
from specdec.policy import Mode
from specdec.sglang_plugin.stages import TRACE_VARIABLE, StageTimes
from specdec.sglang_plugin.switch import Switch


@dataclass(frozen=True)
class WorkerFacts:
    """Which worker runs, as found in the running process."""

    sglang_version: str
    worker_class: str | None
    worker_file: str | None  # relative to the folder that holds the sglang package
    overlap: bool
    overlap_reason: str


@dataclass(frozen=True)
class Step:
    """One decode step, noted when it was run; its tokens are known later."""

    number: int
    started_s: float  # since the report's start
    batch_size: int
    mode: Mode | None  # None: a server that nothing switches
    duration_us: int  # host time of Scheduler.run_batch; under overlap on a GPU that is the launch alone
    stages_us: dict[str, int] | None  # of it, in draft, verify, draft extend; None: not measured


@dataclass
class Report:
    """Counters of the decode steps of one scheduler process."""

    facts: WorkerFacts
    switch: Switch | None
    inactive_reason: str | None
    adaptive: bool = False  # SGLang's own switch decides
    stages: StageTimes | None = None
    trace: TextIO | None = None
    metrics: "Metrics | None" = None
    batch_size: int = 0
    steps: int = 0
    mode: Mode | None = None  # of the last decode step
    mode_steps: Counter[Mode] = field(default_factory=Counter)
    graph_steps: Counter[Mode] = field(default_factory=Counter)  # whose target forward was a CUDA graph
    steps_by_batch_size: Counter[int] = field(default_factory=Counter)
    speculative_tokens: int = 0
    speculative_request_steps: int = 0
    adaptive_switches: Counter[Mode] = field(default_factory=Counter)  # of SGLang's own switch, to this mode
    start_s: float = field(default_factory=time.monotonic)

    def start_step(self) -> float:
        return time.monotonic() - self.start_s

    def end_step(self, started_s: float, batch_size: int, mode: Mode | None, in_graph: bool) -> Step:
        """Count a decode step that has just been run (its result may still be on the way from the device)."""
        duration_us = round((time.monotonic() - self.start_s - started_s) * 1e6)
        self.steps += 1
        self.batch_size = batch_size
        self.steps_by_batch_size[batch_size] += 1
        if mode is not None:
            self.mode_steps[mode] += 1
            self.graph_steps[mode] += in_graph
            if self.adaptive and self.mode not in (None, mode):
                self.adaptive_switches[mode] += 1
        self.mode = mode
        stages_us = self.stages.take() if self.stages is not None else None
        return Step(self.steps, started_s, batch_size, mode, duration_us, stages_us)

    def commit(self, step: Step, requests: int, tokens: int) -> None:
        """Note what a step committed: tokens (bonus included) over the requests that were still alive."""
        if step.mode is Mode.SPECULATIVE:
            self.speculative_tokens += tokens
            self.speculative_request_steps += requests
        if self.metrics is not None:
            self.metrics.observe(step, self)
        if self.trace is not None:
            mode = step.mode.value if step.mode else None
            row: dict[str, Any] = {"step": step.number, "t_s": round(step.started_s, 6)}
            row |= {"batch_size": step.batch_size, "mode": mode, "requests": requests, "tokens": tokens}
            row |= {"duration_us": step.duration_us}
            row |= {f"{stage}_us": spent for stage, spent in (step.stages_us or {}).items()}
            self.trace.write(json.dumps(row) + "\n")

    @property
    def accept_length(self) -> float | None:
        """Tokens per speculative step and request, bonus token included; None before the first such step."""
        if self.speculative_request_steps == 0:
            return None
        return self.speculative_tokens / self.speculative_request_steps

    def state(self) -> dict[str, Any]:
        """The ``specdec`` entry of ``internal_states`` in ``/get_server_info``."""
        switch = self.switch
        return {
            "plugin_version": __version__,
            "sglang_version": self.facts.sglang_version,
            "active": switch is not None,
            "adaptive": self.adaptive,
            "inactive_reason": self.inactive_reason,
            "worker_class": self.facts.worker_class,
            "worker_file": self.facts.worker_file,
            "overlap": self.facts.overlap,
            "overlap_reason": self.facts.overlap_reason,
            "threshold": switch.settings.threshold if switch else None,
            "resume_threshold": switch.settings.resume_at if switch else None,
            "dwell_steps": switch.settings.dwell_steps if switch else None,
            "refused_change": switch.refused_change if switch else None,
            "mode": self.mode.value if self.mode else None,
            "batch_size": self.batch_size,
            "speculative_steps": self.mode_steps[Mode.SPECULATIVE],
            "plain_steps": self.mode_steps[Mode.PLAIN],
            "graph_steps": {mode.value: self.graph_steps[mode] for mode in Mode},
            "switches_off": switch.switches_off if switch else self.adaptive_switches[Mode.PLAIN],
            "switches_on": switch.switches_on if switch else self.adaptive_switches[Mode.SPECULATIVE],
            "speculative_tokens": self.speculative_tokens,
            "speculative_request_steps": self.speculative_request_steps,
            "accept_length": self.accept_length,
            "steps_by_batch_size": {str(size): count for size, count in sorted(self.steps_by_batch_size.items())},
            "trace_path": self.trace.name if self.trace else None,
        }


def open_trace() -> TextIO | None:
    """The step trace named by SPECDEC_TRACE, if any: JSON lines, flushed line by line so that it can be followed."""
    path = os.environ.get(TRACE_VARIABLE)
    # Open as long as the server runs.
    return open(path, "a", buffering=1) if path else None


class Metrics:
    """``specdec_*`` in ``/metrics``: plain counters of this process, no device is asked."""

    def __init__(self, labels: dict[str, str]) -> None:
        # Imported here: prometheus_client fixes its multi-process folder at import, SGLang sets it before.
        from prometheus_client import Counter as Metric
        from prometheus_client import Gauge

        def gauge(name: str, text: str) -> Any:
            return Gauge(name, text, list(labels), multiprocess_mode="mostrecent").labels(**labels)

        steps = Metric("specdec_decode_steps", "Decode steps by mode", [*labels, "mode"])
        self.steps = {mode: steps.labels(**labels, mode=mode.value) for mode in Mode}
        switches = Metric("specdec_switches", "Switches of speculation", [*labels, "to"])
        self.switches = {to: switches.labels(**labels, to=to) for to in ("off", "on")}
        self.tokens = Metric(
            "specdec_speculative_tokens", "Tokens committed by speculative steps", list(labels)
        ).labels(**labels)
        self.request_steps = Metric(
            "specdec_speculative_request_steps", "Requests summed over speculative steps", list(labels)
        ).labels(**labels)
        self.speculating = gauge("specdec_speculating", "1 while decode steps are speculative, 0 while plain")
        self.batch_size = gauge("specdec_batch_size", "Requests in the last decode step")
        self.threshold = gauge("specdec_threshold", "Threshold in force, -1 when none is set")
        self.seen = (0, 0, 0, 0)

    def observe(self, step: Step, report: Report) -> None:
        """Bring the metrics up to what the report has counted."""
        assert step.mode is not None
        assert report.switch is not None
        self.steps[step.mode].inc()
        switch = report.switch
        now = (
            switch.switches_off,
            switch.switches_on,
            report.speculative_tokens,
            report.speculative_request_steps,
        )
        off, on, tokens, request_steps = (new - old for new, old in zip(now, self.seen, strict=True))
        self.seen = now
        if off or on:
            self.switches["off"].inc(off)
            self.switches["on"].inc(on)
        self.tokens.inc(tokens)
        self.request_steps.inc(request_steps)
        self.speculating.set(step.mode is Mode.SPECULATIVE)
        self.batch_size.set(step.batch_size)
        self.threshold.set(-1 if switch.settings.threshold is None else switch.settings.threshold)
