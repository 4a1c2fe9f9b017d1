"""A plugin for tests only, found by SGLang when this folder is on PYTHONPATH. Its variables:

SPECDEC_TEST_RANDOM_SEED   while the threshold is RANDOM, every decode step's mode is drawn from this seed (the same
                           draws on every rank); at any other threshold the server does as always
SPECDEC_TEST_DRAFT_TRACE   file: while it exists, the draft's state after every decode step, and again as the next
                           speculative step takes it up (stale drafts would differ there), JSON lines of
                           [first 8 prompt ids, tokens so far, draft's top tokens, their probabilities, norm of hidden]
SPECDEC_TEST_OVERLAP       SGLang 0.5.23: speculation overlaps on a CPU too, where its one piece for that has a CUDA
                           kernel alone
"""

import json
import os
import random
from importlib.metadata import version

RELEASE = version("sglang")
RANDOM = 1000  # as in tests/server/shapes.py


def register():
    if seed := os.environ.get("SPECDEC_TEST_RANDOM_SEED"):
        _random_policy(int(seed))
    if path := os.environ.get("SPECDEC_TEST_DRAFT_TRACE"):
        _trace_draft_state(path)
    if os.environ.get("SPECDEC_TEST_OVERLAP"):
        _force_overlap()


def _random_policy(seed):
    from specdec.policy import Mode, ThresholdPolicy

    draw = random.Random(seed)
    by_threshold = ThresholdPolicy._wanted

    def wanted(policy, batch_size):
        if policy.settings.threshold == RANDOM:
            return draw.choice(list(Mode))
        return by_threshold(policy, batch_size)

    ThresholdPolicy._wanted = wanted


def _force_overlap():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def gather(indices, *rows):
        return tuple(row if row is None else row[indices] for row in rows)

    off = "sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu"
    HookRegistry.register(off, lambda server_args: None, HookType.REPLACE)
    target = "sglang.kernels.ops.speculative.gather_spec_extras.gather_spec_extras"
    HookRegistry.register(target, gather, HookType.REPLACE)


def _trace_draft_state(path):
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def write(reqs, seq_lens, draft_input):
        tokens, probabilities = draft_input.topk_index.tolist(), draft_input.topk_p.tolist()
        norms = draft_input.hidden_states.float().norm(dim=-1).tolist()
        with open(path, "a") as trace:
            for req, *state in zip(reqs, seq_lens, tokens, probabilities, norms, strict=True):
                trace.write(json.dumps([list(req.origin_input_ids[:8]), *state]) + "\n")

    def v1(original, worker, batch):
        if not os.path.exists(path):
            return original(worker, batch)
        extended = batch.spec_info
        by_slot = {req.req_pool_idx: req for req in batch.reqs}
        reqs, seq_lens = [by_slot[i] for i in extended.req_pool_indices.tolist()], extended.seq_lens.tolist()
        draft_input = original(worker, batch)
        write(reqs, seq_lens, draft_input)
        return draft_input

    def v2(original, worker, batch, batch_result, *args, **kwargs):
        if not os.path.exists(path):
            return original(worker, batch, batch_result, *args, **kwargs)
        reqs = list(batch.reqs)
        out = original(worker, batch, batch_result, *args, **kwargs)
        draft_input = batch_result.next_draft_input
        knows_lengths = draft_input if RELEASE == "0.5.12" else batch_result
        write(reqs, knows_lengths.new_seq_lens.tolist(), draft_input)
        return out

    def taken_up(worker, batch, *args, **kwargs):
        if os.path.exists(path):
            write(list(batch.reqs), batch.seq_lens.tolist(), batch.spec_info)

    package = "sglang.srt.speculative."
    if RELEASE == "0.5.12":
        target = package + "eagle_worker.EAGLEWorker.forward_draft_extend_after_decode"
        HookRegistry.register(target, v1, HookType.AROUND)
        HookRegistry.register(package + "eagle_worker.EAGLEWorker.draft", taken_up, HookType.BEFORE)
    HookRegistry.register(package + "eagle_worker_v2.EagleDraftWorker.draft", taken_up, HookType.BEFORE)
    target = package + "eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode"
    HookRegistry.register(target, v2, HookType.AROUND)
