"""EAGLEWorkerV2 (v2, overlap, topk 1) with the switch: speculative/eagle_worker_v2.py of SGLang 0.5.12."""

from typing import Any

from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

from specdec.policy import Mode
from specdec.sglang_plugin.sglang_0_5_12.plain_step import (
    build_plain_state,
    one_node_verify,
    swapped,
)
from specdec.sglang_plugin.stages import time_stages
from specdec.sglang_plugin.switch import make_switch


class SwitchedEAGLEWorkerV2(EAGLEWorkerV2):  # type: ignore[misc]
    """Decode steps are speculative or plain, as the switch decides from the batch size.

    Relies on: forward_batch_generation runs the draft worker's draft() -> verify -> draft extend for every decode
    batch, and each result carries its own number of draft tokens a request (the stride of its tokens), so that a
    result of a plain step is read right though the next step may speculate.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.switch = make_switch(self.server_args, self.tp_rank)
        self.plain = False
        draft = self.draft_worker
        self.speculative_draft = draft.draft
        draft.draft = self._draft
        self.stages = time_stages(
            draft=(draft, "draft"), verify=(self, "verify"), draft_extend=(draft, "_draft_extend_for_decode")
        )
        with (
            draft.draft_tp_context(draft.draft_runner.tp_group),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
        ):
            self.plain_state = build_plain_state(*self._parts())

    def forward_batch_generation(self, model_worker_batch: Any) -> Any:
        mode = model_worker_batch.forward_mode
        is_decode = not (mode.is_extend() or model_worker_batch.is_extend_in_batch or mode.is_idle())
        if not is_decode or self.switch.decide(len(model_worker_batch.seq_lens)) is Mode.SPECULATIVE:
            return super().forward_batch_generation(model_worker_batch)
        self.plain = True
        try:
            with swapped(*self._parts(), self.plain_state):
                return super().forward_batch_generation(model_worker_batch)
        finally:
            self.plain = False

    def _parts(self) -> tuple[Any, Any, Any, Any]:
        """Verifying worker, draft worker, and the runners of the target and the draft model."""
        return self, self.draft_worker, self.target_worker.model_runner, self.draft_worker.draft_runner

    def _draft(self, model_worker_batch: Any) -> EagleVerifyInput:
        """Stands in for the draft worker's draft()."""
        if not self.plain:
            return self.speculative_draft(model_worker_batch)
        return one_node_verify(
            model_worker_batch.spec_info.bonus_tokens,
            model_worker_batch.seq_lens,
            model_worker_batch.seq_lens_cpu,
            model_worker_batch.seq_lens_sum,
            self.topk,
            capture_hidden_mode=None,  # set by prepare_for_v2_verify
        )
