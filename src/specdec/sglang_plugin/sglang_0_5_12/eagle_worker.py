"""EAGLEWorker (v1) with the switch: speculative/eagle_worker.py of SGLang 0.5.12."""

from typing import Any

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_worker import EAGLEWorker

from specdec.policy import Mode
from specdec.sglang_plugin.sglang_0_5_12.plain_step import (
    build_plain_state,
    one_node_verify,
    swapped,
)
from specdec.sglang_plugin.stages import time_stages
from specdec.sglang_plugin.switch import make_switch


class SwitchedEAGLEWorker(EAGLEWorker):  # type: ignore[misc]
    """Decode steps are speculative or plain, as the switch decides from the batch size.

    Relies on: forward_batch_generation runs draft -> verify -> draft extend for every decode batch, and takes from
    draft() nothing but the verify input, so that a one-node tree turns the step into a plain one. The draft extend of
    that node keeps the draft's KV cache and hidden states as they would be had the step speculated.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.switch = make_switch(self.server_args, self.tp_rank)
        self.plain = False
        self.stages = time_stages(
            draft=(self, "draft"), verify=(self, "verify"), draft_extend=(self, "forward_draft_extend_after_decode")
        )
        with (
            self.draft_tp_context(self.draft_model_runner.tp_group),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
        ):
            self.plain_state = build_plain_state(*self._parts())

    def forward_batch_generation(self, batch: Any) -> Any:
        is_decode = not (batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle())
        if not is_decode or self.switch.decide(batch.batch_size()) is Mode.SPECULATIVE:
            return super().forward_batch_generation(batch)
        self.plain = True
        try:
            with swapped(*self._parts(), self.plain_state):
                return super().forward_batch_generation(batch)
        finally:
            self.plain = False

    def _parts(self) -> tuple[Any, Any, Any, Any]:
        """Verifying worker, draft worker (both this one), and the runners of the target and the draft model."""
        return self, self, self.target_worker.model_runner, self.draft_model_runner

    def draft(self, batch: Any) -> EagleVerifyInput:
        if not self.plain:
            return super().draft(batch)
        self._prepare_plain_decode(batch)
        return one_node_verify(
            batch.spec_info.bonus_tokens,
            batch.seq_lens,
            batch.seq_lens_cpu,
            batch.seq_lens_sum,
            self.topk,
            CaptureHiddenMode.FULL,
        )

    def _prepare_plain_decode(self, batch: Any) -> None:
        """What _draft_preprocess_decode does beside allocating the draft's slots, which a plain step does not need."""
        batch.maybe_evict_swa()
        for req in batch.reqs:
            req.decode_batch_idx += 1
        penalizer = batch.sampling_info.penalizer_orchestrator
        if penalizer.is_required:
            penalizer.cumulate_output_tokens(batch.spec_info.bonus_tokens.to(torch.int64))
        batch.return_hidden_states = False
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
