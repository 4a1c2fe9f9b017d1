"""SGLang 0.5.12: the switch in EAGLEWorker (v1, any topk, no overlap) and EAGLEWorkerV2 (v2, topk 1, overlap)."""

from typing import Any

from specdec.sglang_plugin import scheduler
from specdec.sglang_plugin.hooks import around, refuse


def install() -> None:
    """Hook this release."""
    scheduler.install(f"{scheduler.SCHEDULER}.process_batch_result_decode")
    # Relies on: the scheduler instantiates the class that create_worker(server_args) returns, whatever the flags.
    around("sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker", _create_worker, "server_args")


def _create_worker(original: Any, algorithm: Any, server_args: Any) -> Any:
    """SGLang chooses the worker class; the switch goes into the class it chose."""
    chosen = original(algorithm, server_args)
    if not hasattr(server_args, "specdec"):
        return chosen
    from sglang.srt.speculative.eagle_worker import EAGLEWorker
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
    from specdec.sglang_plugin.sglang_0_5_12.eagle_worker import SwitchedEAGLEWorker
    from specdec.sglang_plugin.sglang_0_5_12.eagle_worker_v2 import SwitchedEAGLEWorkerV2

    switched = {EAGLEWorker: SwitchedEAGLEWorker, EAGLEWorkerV2: SwitchedEAGLEWorkerV2}
    if chosen not in switched:
        refuse(f"the switch cannot act in {chosen.__name__}, only in EAGLEWorker and EAGLEWorkerV2")
    return switched[chosen]
