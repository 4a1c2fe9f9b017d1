"""SGLang 0.5.12: the switch in EAGLEWorker (v1, any topk, no overlap) and EAGLEWorkerV2 (v2, topk 1, overlap)."""

from typing import Any

from specdec.sglang_plugin import flags, scheduler
from specdec.sglang_plugin.hooks import after, around, refuse, require

SPECULATIVE = "sglang.srt.speculative."

# What the switched workers and plain_step.py call or override, and the parameters they count on.
RELIED_ON: tuple[tuple[str, ...], ...] = (
    (SPECULATIVE + "eagle_worker.EAGLEWorker.forward_batch_generation", "batch"),
    (SPECULATIVE + "eagle_worker.EAGLEWorker.draft", "batch"),
    (SPECULATIVE + "eagle_worker.EAGLEWorker.init_cuda_graphs",),
    (SPECULATIVE + "eagle_worker.EAGLEWorker._override_worker_state", "speculative_num_draft_tokens"),
    (SPECULATIVE + "eagle_worker_v2.EAGLEWorkerV2.forward_batch_generation", "model_worker_batch"),
    (SPECULATIVE + "eagle_worker_v2.EAGLEWorkerV2._override_worker_state", "speculative_num_draft_tokens"),
    (SPECULATIVE + "eagle_worker_v2.EagleDraftWorker.draft", "model_worker_batch"),
    (SPECULATIVE + "eagle_worker_v2.EagleDraftWorker.init_cuda_graphs",),
    (SPECULATIVE + "eagle_info.EagleVerifyInput", "draft_token", "custom_mask", "retrieve_index", "draft_token_num"),
    (SPECULATIVE + "draft_utils.DraftBackendFactory.create_draft_extend_backend",),
    ("sglang.srt.model_executor.model_runner.ModelRunner._get_attention_backend", "init_new_workspace"),
    ("sglang.srt.model_executor.cuda_graph_runner.CudaGraphRunner", "attn_backend", "speculative_num_draft_tokens"),
)


def install() -> None:
    """Hook this release."""
    # Relies on: from_cli_args resolves the settings (__post_init__), before the scheduler processes are started.
    after("sglang.srt.server_args.ServerArgs.from_cli_args", _check_can_act)
    scheduler.install(f"{scheduler.SCHEDULER}.process_batch_result_decode")
    around(f"{scheduler.SCHEDULER}.set_internal_state", _set_internal_state, "recv_req")
    # Relies on: the scheduler instantiates the class that create_worker(server_args) returns, whatever the flags.
    around(SPECULATIVE + "spec_info.SpeculativeAlgorithm.create_worker", _create_worker, "server_args")


def _check_can_act(server_args: Any, cls: type, args: Any) -> None:
    flags.check_can_act(server_args, "0.5.12")


def _create_worker(original: Any, algorithm: Any, server_args: Any) -> Any:
    """SGLang chooses the worker class; the switch goes into the class it chose."""
    chosen = original(algorithm, server_args)
    if not hasattr(server_args, flags.ATTRIBUTE):
        return chosen
    for target, *parameters in RELIED_ON:
        require(target, *parameters)
    from sglang.srt.speculative.eagle_worker import EAGLEWorker
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    from specdec.sglang_plugin.sglang_0_5_12.eagle_worker import SwitchedEAGLEWorker
    from specdec.sglang_plugin.sglang_0_5_12.eagle_worker_v2 import SwitchedEAGLEWorkerV2

    switched = {EAGLEWorker: SwitchedEAGLEWorker, EAGLEWorkerV2: SwitchedEAGLEWorkerV2}
    if chosen not in switched:
        refuse(f"the switch cannot act in {chosen.__name__}, only in EAGLEWorker and EAGLEWorkerV2")
    return switched[chosen]


def _set_internal_state(original: Any, serving: Any, recv_req: Any) -> Any:
    """Relies on: recv_req.server_args is the requested change, the answer carries the server's arguments too."""
    if flags.ATTRIBUTE not in recv_req.server_args:
        return original(serving, recv_req)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    updated = scheduler.change_settings(serving, recv_req.server_args)
    return SetInternalStateReqOutput(updated=updated, server_args={})
