"""SGLang's environment variables: read as SGLang reads them, and the speculative ones that a release has."""

import re
from collections.abc import Mapping

# What makes a SGLANG_* variable look speculative by its name.
_SPECULATIVE = re.compile(r"SPEC|EAGLE|MTP|NEXTN|(?<!E)NGRAM|DRAFT|DFLASH|DSPARK|OVERLAP_PLAN|SIMULATE_ACC")

# Every such name in the release's Python sources; tests/unit/test_worker_path_against_sglang.py looks again.
_VARIABLES_0_5_12 = """
SGLANG_ENABLE_OVERLAP_PLAN_STREAM
SGLANG_ENABLE_SPEC_V2
SGLANG_NGRAM_FORCE_GREEDY_VERIFY
SGLANG_NSA_ENABLE_MTP_PRECOMPUTE_METADATA
SGLANG_NVFP4_CKPT_FP8_NEXTN_MOE
SGLANG_SIMULATE_ACC_LEN
SGLANG_SIMULATE_ACC_METHOD
SGLANG_SPEC_ENABLE_STRICT_FILTER_CHECK
SGLANG_SPEC_EXPANSION_SAFETY_FACTOR
SGLANG_SPEC_NAN_DETECTION
SGLANG_SPEC_OOB_DETECTION
"""
_VARIABLES_0_5_23 = """
SGLANG_AITER_UNIFIED_DRAFT_EXTEND
SGLANG_AMD_FLYDSL_MEGA_MOE_DECODE_MTPR
SGLANG_AMD_FLYDSL_MEGA_MOE_MTPR
SGLANG_DFLASH_EAGER_DRAFT_SAMPLER
SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH
SGLANG_DSPARK_ACCEPT_TAIL_MAX_BS
SGLANG_DSPARK_ACCEPT_TAIL_MIN_BS
SGLANG_DSPARK_BLOCK_ACCEPT_ESTIMATE_PATH
SGLANG_DSPARK_BLOCK_ACCEPT_ONLINE_INTERVAL
SGLANG_DSPARK_CONFIDENCE_RELAY_LAG_STEPS
SGLANG_DSPARK_DEBUG_CONFIDENCE_METRICS
SGLANG_DSPARK_DEBUG_CONFIDENCE_PREFIX_SCHEDULER
SGLANG_DSPARK_DEBUG_DUMP
SGLANG_DSPARK_DEFER_CONTEXT_KV
SGLANG_DSPARK_EMBED_IN_GRAPH
SGLANG_DSPARK_ENABLE_MULTI_STREAM
SGLANG_DSPARK_ENABLE_SPS_RECORD
SGLANG_DSPARK_FAST_KERNEL
SGLANG_DSPARK_FAST_SAMPLING
SGLANG_DSPARK_FOLDED_PROPOSAL
SGLANG_DSPARK_FOLDED_SAMPLING
SGLANG_DSPARK_FP32_LM_HEAD
SGLANG_DSPARK_FUSED_ACCEPT_TAIL
SGLANG_DSPARK_LOG_SPS_PRED_INTERVAL
SGLANG_DSPARK_NVLINK_VOCAB_GATHER
SGLANG_DSPARK_OPT_FUSED_GREEDY_MARKOV
SGLANG_DSPARK_OPT_MARKOV_W2_BF16
SGLANG_DSPARK_OPT_MARKOV_W2_TP_SHARD
SGLANG_DSPARK_SIMULATE_FOLD
SGLANG_DSPARK_STACKED_CTX_KV
SGLANG_DSPARK_STS_COLLECT_PATH
SGLANG_DSPARK_USE_GREEDY_DRAFT
SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION
SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX
SGLANG_ENABLE_OVERLAP_PLAN_STREAM
SGLANG_ENABLE_PP_SPEC
SGLANG_ENABLE_SINGLE_CG_DRAFT
SGLANG_EXPERIMENTAL_ONLINE_C128_MTP
SGLANG_GLM_NEXTN_MOE_PTPC
SGLANG_HIP_DSPARK_DRAFT_RAW_METADATA
SGLANG_NGRAM_FORCE_GREEDY_VERIFY
SGLANG_NVFP4_CKPT_FP8_NEXTN_MOE
SGLANG_OPT_DSV41_DSPARK_DRAFT_PREP_FORK
SGLANG_OPT_DSV41_DSPARK_MID_FOLD
SGLANG_OPT_DSV41_DSPARK_ONE_LAUNCH_COMMIT_STAGE
SGLANG_OPT_DSV41_DSPARK_POST_FOLD
SGLANG_OPT_DSV41_DSPARK_PREPARE_INPUTS_ONCE
SGLANG_OPT_DSV41_DSPARK_SIM_DRAW_AHEAD
SGLANG_OPT_DSV41_DSPARK_SKIP_PREFILLED_INPUTS
SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR
SGLANG_OPT_SM120_MTP_ROUTER_TOP22
SGLANG_ROCM_OPT_DSPARK_FP8_LM_HEAD
SGLANG_SIMULATE_ACC_GREEDY
SGLANG_SIMULATE_ACC_LEN
SGLANG_SIMULATE_ACC_METHOD
SGLANG_SIMULATE_ACC_TOKEN_MODE
SGLANG_SPEC_EXPANSION_SAFETY_FACTOR
SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND
SGLANG_SPEC_TP_SYNC
SGLANG_USE_ATTN_TP_NGRAM
"""
SPECULATIVE_VARIABLES = {
    "0.5.12": frozenset(_VARIABLES_0_5_12.split()),
    "0.5.23": frozenset(_VARIABLES_0_5_23.split()),
}

_TRUE = ("true", "1", "yes", "y")
_FALSE = ("false", "0", "no", "n")


def looks_speculative(name: str) -> bool:
    """Whether a SGLANG_* variable's name is about speculation."""
    return name.startswith("SGLANG_") and bool(_SPECULATIVE.search(name.removeprefix("SGLANG_")))


def truth(env: Mapping[str, str], name: str, default: bool) -> bool:
    """A boolean variable as SGLang's EnvBool reads it: a value that is not boolean counts as not set."""
    value = env.get(name, "").lower()
    if value in _TRUE:
        return True
    return False if value in _FALSE else default


def dead_variables(env: Mapping[str, str], release: str) -> list[str]:
    """One warning for each speculative SGLANG_* variable that is set and that ``release`` does not have."""
    warnings = []
    for name in sorted(env):
        if not looks_speculative(name) or name in SPECULATIVE_VARIABLES[release]:
            continue
        others = [other for other, names in SPECULATIVE_VARIABLES.items() if name in names]
        origin = f"SGLang {others[0]} has it" if others else "no supported release has it"
        warnings.append(f"{name}={env[name]} does nothing: SGLang {release} has no such variable ({origin})")
    return warnings


def ill_typed(env: Mapping[str, str], name: str, default: bool) -> list[str]:
    """A warning when a boolean variable is set to something that SGLang does not take as boolean."""
    if name not in env or env[name].lower() in _TRUE + _FALSE:
        return []
    words = f"{'/'.join(_TRUE)} or {'/'.join(_FALSE)}"
    return [f"{name}={env[name]!r} is not boolean ({words}): SGLang takes {default}"]
