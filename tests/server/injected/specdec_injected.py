"""A plugin for tests only, found by SGLang when this folder is on PYTHONPATH. Its variables:

SPECDEC_TEST_RANDOM_SEED   while a threshold is set, every decode step's mode is drawn at random from this seed (the
                           same draws on every rank); without a threshold the server speculates as always
SPECDEC_TEST_DRAFT_TRACE   file: the draft's state after every decode step, and again as the next speculative step
                           takes it up (stale drafts would differ there), JSON lines of
                           [first 8 prompt ids, tokens so far, draft's top tokens, their probabilities, norm of hidden]
"""

import json
import os
import random
from importlib.metadata import version


def register():
    if seed := os.environ.get("SPECDEC_TEST_RANDOM_SEED"):
        _random_policy(int(seed))
    if path := os.environ.get("SPECDEC_TEST_DRAFT_TRACE"):
        _trace_draft_state(path)


def _random_policy(seed):
    from specdec.policy import Mode, ThresholdPolicy

    draw = random.Random(seed)

    def wanted(policy, batch_size):
        return Mode.SPECULATIVE if policy.settings.threshold is None else draw.choice(list(Mode))

    ThresholdPolicy._wanted = wanted


def _trace_draft_state(path):
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    trace = open(path, "a", buffering=1)  # noqa: SIM115 - open as long as the server runs

    def write(reqs, seq_lens, draft_input):
        tokens, probabilities = draft_input.topk_index.tolist(), draft_input.topk_p.tolist()
        norms = draft_input.hidden_states.float().norm(dim=-1).tolist()
        for row in zip(reqs, seq_lens, tokens, probabilities, norms, strict=True):
            req, *state = row
            trace.write(json.dumps([list(req.origin_input_ids[:8]), *state]) + "\n")

    def v1(original, worker, batch):
        extended = batch.spec_info
        by_slot = {req.req_pool_idx: req for req in batch.reqs}
        reqs, seq_lens = [by_slot[i] for i in extended.req_pool_indices.tolist()], extended.seq_lens.tolist()
        draft_input = original(worker, batch)
        write(reqs, seq_lens, draft_input)
        return draft_input

    def v2(original, worker, batch, batch_result, *args, **kwargs):
        reqs = list(batch.reqs)
        out = original(worker, batch, batch_result, *args, **kwargs)
        draft_input = batch_result.next_draft_input
        write(reqs, draft_input.new_seq_lens.tolist(), draft_input)
        return out

    def taken_up(worker, batch, *args, **kwargs):
        write(list(batch.reqs), batch.seq_lens.tolist(), batch.spec_info)

    package = "sglang.srt.speculative."
    if version("sglang") == "0.5.12":
        target = package + "eagle_worker.EAGLEWorker.forward_draft_extend_after_decode"
        HookRegistry.register(target, v1, HookType.AROUND)
        HookRegistry.register(package + "eagle_worker.EAGLEWorker.draft", taken_up, HookType.BEFORE)
    HookRegistry.register(package + "eagle_worker_v2.EagleDraftWorker.draft", taken_up, HookType.BEFORE)
    target = package + "eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode"
    HookRegistry.register(target, v2, HookType.AROUND)
