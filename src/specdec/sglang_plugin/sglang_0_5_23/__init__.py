"""SGLang 0.5.23: the switch in EAGLEWorkerV2, chain (topk 1) and tree (topk > 1), with overlap or without.

Taken from SGLang's own zero-step machinery: the state that ``build_adaptive_runtime_state(0, 1)`` builds, the
one-node verify and the draft extend that its worker runs at zero steps. Not taken: its AdaptiveController,
whose policy could be replaced (``AdaptiveSpecPolicy``). A controller exists only while
``--speculative-adaptive`` is in force, which SGLang drops for trees; and each of its switches writes the
number of draft steps into the resolved settings, from which the scheduler sizes a decode batch's KV slots
(get_alloc_len_per_decode) before that batch's own mode is decided: a tree that drafts more slots (topk *
steps) than it verifies would be short of slots in the step that speculates again. So chain and tree share one
mechanism, as in SGLang 0.5.12: the states are swapped for one step, and the settings never change.
"""

from typing import Any

from specdec.sglang_plugin import flags, scheduler
from specdec.sglang_plugin.hooks import after, around, refuse, require
from specdec.sglang_plugin.sglang_0_5_23 import live_change

SPECULATIVE = "sglang.srt.speculative."
WORKER = SPECULATIVE + "eagle_worker_v2.EAGLEWorkerV2."
PROCESS_DECODE = (
    "sglang.srt.managers.scheduler_components.batch_result_processor."
    "SchedulerBatchResultProcessor.process_batch_result_decode"
)
SKIP_DRAFT_EXTEND = "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"

# What the switched worker calls or overrides, and the parameters it counts on.
RELIED_ON: tuple[tuple[str, ...], ...] = (
    (WORKER + "forward_batch_generation", "batch"),
    (WORKER + "init_cuda_graphs",),
    (WORKER + "build_adaptive_runtime_state", "speculative_num_steps", "speculative_num_draft_tokens"),
    (WORKER + "_build_trivial_verify_input", "batch"),
    (SPECULATIVE + "adaptive_runtime_state.SpecRuntimeState", "target_graph_runner", "cuda_graph_runner"),
    (SPECULATIVE + "spec_utils.draft_tp_context",),
)


def install() -> None:
    """Hook this release."""
    # Relies on: every start resolves its ServerArgs, once, before the scheduler processes are started.
    after("sglang.srt.server_args.ServerArgs.resolve_once", _check_can_act)
    scheduler.install(PROCESS_DECODE)
    # Relies on: the scheduler instantiates the class that create_worker(server_args) returns.
    around(SPECULATIVE + "spec_info.SpeculativeAlgorithm.create_worker", _create_worker, "server_args")
    live_change.install()


def _check_can_act(result: None, server_args: Any) -> None:
    flags.check_can_act(server_args, "0.5.23")
    from sglang.srt.environ import envs

    if hasattr(server_args, flags.ATTRIBUTE) and getattr(envs, SKIP_DRAFT_EXTEND).get():
        refuse(f"{SKIP_DRAFT_EXTEND} leaves the draft's KV cache stale while speculation is off; unset it")


def _create_worker(original: Any, algorithm: Any, server_args: Any) -> Any:
    """SGLang chooses the worker class; the switch goes into the class it chose."""
    chosen = original(algorithm, server_args)
    if not hasattr(server_args, flags.ATTRIBUTE):
        return chosen
    for target, *parameters in RELIED_ON:
        require(target, *parameters)
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    from specdec.sglang_plugin.sglang_0_5_23.eagle_worker_v2 import SwitchedEAGLEWorkerV2

    if chosen is not EAGLEWorkerV2:
        refuse(f"the switch cannot act in {chosen.__name__}, only in EAGLEWorkerV2")
    return SwitchedEAGLEWorkerV2
