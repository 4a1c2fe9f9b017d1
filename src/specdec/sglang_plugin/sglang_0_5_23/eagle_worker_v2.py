"""EAGLEWorkerV2 with the switch: speculative/eagle_worker_v2.py of SGLang 0.5.23."""

from contextlib import AbstractContextManager
from typing import Any

from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.adaptive_runtime_state import SpecRuntimeState
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.spec_utils import draft_tp_context

from specdec.policy import Mode
from specdec.sglang_plugin.hooks import refuse
from specdec.sglang_plugin.stages import time_stages
from specdec.sglang_plugin.swap import swapped_attributes
from specdec.sglang_plugin.switch import make_switch

# A plain step drafts nothing and verifies one node a request, the bonus token.
PLAIN_STEPS, PLAIN_DRAFT_TOKENS = 0, 1


def refuse_shared_selection(draft_extend_backend: Any) -> None:
    """Qwen's sparse attention can let draft steps reuse what the last draft extend selected; a plain step's draft
    extend has a backend of its own and would leave that old. SGLang turns it off under --speculative-adaptive.
    """
    # Relies on: QwenSparseAttnBackend.set_mtp_shared_sparse_indices (layers/attention/qwen_sparse_attn_backend.py).
    if getattr(draft_extend_backend, "_mtp_shared_sparse_indices", None) is not None:
        refuse(
            "the model's index_share_for_mtp_iteration does not go with plain steps; turn it off with "
            """--json-model-override-args '{"index_share_for_mtp_iteration": false}'"""
        )


class SwitchedEAGLEWorkerV2(EAGLEWorkerV2):  # type: ignore[misc]
    """Decode steps are speculative or plain, as the switch decides from the batch size.

    Relies on: forward_batch_generation at zero steps verifies the bonus token alone and runs the draft extend
    on it, for any topk, which keeps the draft's KV cache and hidden states as they would be had the step
    speculated; and each result carries its own number of draft tokens a request (the stride of its tokens),
    so that under overlap a result of a plain step is read right though the next step may speculate.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.switch = make_switch(self.server_args, get_parallel().tp_rank)
        self.stages = time_stages(
            draft=(self.draft_worker, "draft"),
            verify=(self, "verify"),
            draft_extend=(self.draft_worker, "_draft_extend_for_decode"),
        )

    def init_cuda_graphs(self) -> None:
        """The start's last stage: memory pools, attention backends and the speculative graphs exist."""
        super().init_cuda_graphs()
        refuse_shared_selection(self.draft_worker.draft_extend_attn_backend)
        with (
            draft_tp_context(self.draft_worker.parallel_layout),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
        ):
            self.plain_state = self.build_adaptive_runtime_state(PLAIN_STEPS, PLAIN_DRAFT_TOKENS)

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        is_decode = not (batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle())
        if not is_decode or self.switch.decide(len(batch.seq_lens)) is Mode.SPECULATIVE:
            return super().forward_batch_generation(batch, *args, **kwargs)
        with self._swapped(self.plain_state):
            return super().forward_batch_generation(batch, *args, **kwargs)

    def _swapped(self, state: SpecRuntimeState) -> AbstractContextManager[None]:
        """Run with the state's resources, then put the speculative ones back.

        The same resources that SGLang's apply_runtime_state replaces. That also changes the resolved
        settings, from which KV slots are sized: this does not.
        """
        draft, target_runner = self.draft_worker, self.target_worker.model_runner
        draft_runner = draft.draft_runner
        replaced: list[tuple[Any, str, Any]] = [
            (self, "speculative_num_steps", state.speculative_num_steps),
            (self, "speculative_num_draft_tokens", state.speculative_num_draft_tokens),
            (draft, "speculative_num_steps", state.speculative_num_steps),
            (draft, "speculative_num_draft_tokens", state.speculative_num_draft_tokens),
            (draft, "draft_attn_backend", state.draft_attn_backend),
            (draft_runner, "draft_attn_backend", state.draft_attn_backend),
            (draft, "cuda_graph_runner", state.cuda_graph_runner),
            (draft, "draft_extend_attn_backend", state.draft_extend_attn_backend),
            (draft, "cuda_graph_runner_for_draft_extend", state.cuda_graph_runner_for_draft_extend),
            (target_runner, "attn_backend", state.target_attn_backend),
            (target_runner, "decode_cuda_graph_runner", state.target_graph_runner),
        ]
        if state.draft_extend_attn_backend is not None:  # None: the draft extend uses the runner's own
            replaced.append((draft_runner, "attn_backend", state.draft_extend_attn_backend))
        return swapped_attributes(replaced)
