"""Hooks into SGLang's scheduler, the same in both releases: count decode steps, show and change the switch.

Relied on in Scheduler (managers/scheduler.py): ``run_batch`` runs every batch on this thread, ``init_model_worker``
leaves the worker that runs in ``draft_worker`` (None without speculation), ``set_internal_state`` requests reach all
tensor-parallel ranks between the same two steps (they are broadcast with the requests). The form of such a request
differs, so each release's module hooks it and calls ``change_settings``.
"""

import inspect
import logging
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from specdec.policy import Mode
from specdec.sglang_plugin import flags
from specdec.sglang_plugin.hooks import after, around, refuse
from specdec.sglang_plugin.report import Metrics, Report, WorkerFacts, open_trace
from specdec.sglang_plugin.switch import Switch, describe
from specdec.worker_path.server_flags import THRESHOLD_FLAG

logger = logging.getLogger("specdec")

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def install(process_decode_target: str) -> None:
    """process_decode_target: where this release processes a decode step's result, as ``(self, batch, result)``."""
    after(f"{SCHEDULER}.init_model_worker", _after_init_model_worker)
    around(f"{SCHEDULER}.run_batch", _run_batch, "batch")
    around(process_decode_target, _process_decode, "batch", "result")
    after(f"{SCHEDULER}.get_internal_state", _after_get_internal_state, "recv_req")


def _after_init_model_worker(result: None, scheduler: Any) -> None:
    """All workers are built: attach the report, and say once what runs."""
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank

    from specdec.worker_path.path import rules_for

    switch: Switch | None = getattr(scheduler.draft_worker, "switch", None)
    tp_rank = get_tensor_model_parallel_rank()
    settings = rules_for(version("sglang")).resolved(scheduler.server_args)
    facts = worker_facts(scheduler)
    if switch is None and hasattr(scheduler.server_args, flags.ATTRIBUTE):  # SGLang only logs a hook that fails
        refuse(f"{THRESHOLD_FLAG} has not taken effect: {facts.worker_class} runs without the switch")
    inactive = None if switch else f"started without {THRESHOLD_FLAG}"
    adaptive = getattr(scheduler.draft_worker, "adaptive_controller", None) is not None
    stages = getattr(scheduler.draft_worker, "stages", None)
    report = Report(facts, switch, inactive, adaptive, stages)
    if tp_rank == 0:
        report.trace = open_trace()
        if switch is not None:
            if settings.enable_metrics:
                report.metrics = Metrics({"model_name": settings.served_model_name, "tp_rank": str(tp_rank)})
            logger.info(
                "specdec: switch active: %s; SGLang %s, worker %s (%s), overlap %s: %s; at most %d running requests",
                describe(switch.settings),
                facts.sglang_version,
                facts.worker_class,
                facts.worker_file,
                "on" if facts.overlap else "off",
                facts.overlap_reason,
                scheduler.max_running_requests,  # 48 with speculation unless --max-running-requests is given
            )
    scheduler.specdec = report


def worker_facts(scheduler: Any) -> WorkerFacts:
    """Which worker class runs, from which file, as found in this process; not what the flags say."""
    from specdec.worker_path import overlap_reason

    worker_class = worker_file = None
    if scheduler.draft_worker is not None:
        cls = next(c for c in type(scheduler.draft_worker).__mro__ if c.__module__.startswith("sglang."))
        source = Path(inspect.getfile(cls))
        parts = source.parts
        worker_class, worker_file = cls.__name__, "/".join(parts[len(parts) - 1 - parts[::-1].index("sglang") :])
    release = version("sglang")
    reason = overlap_reason(scheduler.server_args, release)
    return WorkerFacts(release, worker_class, worker_file, bool(scheduler.enable_overlap), reason)


def _run_batch(original: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Count decode steps; prefill, mixed and idle batches are not decode steps."""
    if not batch.forward_mode.is_decode():
        return original(scheduler, batch, *args, **kwargs)
    report: Report = scheduler.specdec
    batch_size, started_s = batch.batch_size(), report.start_step()
    result = original(scheduler, batch, *args, **kwargs)
    step = report.end_step(started_s, batch_size, _mode(report, result), bool(result.can_run_cuda_graph))
    result.specdec = (report, step)
    return result


def _mode(report: Report, result: Any) -> Mode | None:
    """The mode of a step that has run: the switch knows; SGLang's own shows by verifying the bonus token alone."""
    if report.switch is not None:
        return report.switch.mode
    if report.adaptive:
        return Mode.PLAIN if result.speculative_num_draft_tokens == 1 else Mode.SPECULATIVE
    return None


def _process_decode(original: Any, processor: Any, batch: Any, result: Any) -> Any:
    """The step's tokens are on the host now: note them, without what overlap ran beyond a request's end.

    v1 ends requests inside verify and has its counts already; otherwise a request that is finished or retracted here
    was so before this step and its tokens are dropped (batch result processing in both releases).
    """
    noted = getattr(result, "specdec", None)
    if noted is None:
        return original(processor, batch, result)
    counted_in_verify = result.num_correct_drafts_per_req_cpu is not None
    alive = [counted_in_verify or not (req.finished() or req.is_retracted) for req in batch.reqs]
    original(processor, batch, result)
    drafts = result.num_correct_drafts_per_req_cpu or [0] * len(alive)
    tokens = sum(correct + 1 for correct, counts in zip(drafts, alive, strict=True) if counts)
    report, step = noted
    report.commit(step, sum(alive), tokens)
    return None


def _after_get_internal_state(output: Any, scheduler: Any, recv_req: Any) -> Any:
    output.internal_state["specdec"] = scheduler.specdec.state()
    return output


def change_settings(scheduler: Any, asked: Mapping[str, Any]) -> bool:
    """Change the switch as the key ``specdec`` of a set_internal_state request asks; False if nothing changed.

    A request that also sets other things is refused whole, not halved.
    """
    switch: Switch | None = scheduler.specdec.switch
    if switch is None:
        logger.warning("specdec: settings unchanged: the switch is not active in this server")
        return False
    if len(asked) > 1:
        logger.warning("specdec: settings unchanged: set specdec in a request of its own")
        return False
    return switch.change(asked["specdec"])
