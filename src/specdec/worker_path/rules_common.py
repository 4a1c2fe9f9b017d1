"""Rules that SGLang 0.5.12 and 0.5.23 share."""

from collections.abc import Collection
from typing import Any

from specdec.worker_path.settings import GraphCeiling, Resolution, Settings, StartError, Worker

SPECULATION_CAP = 48  # running requests, when --max-running-requests is not given
DEEPSEEK_V4 = "DeepseekV4ForCausalLM"
DEEPSEEK_V4_CAP = 256  # set by the model's own defaults, before speculation's

NO_ALGORITHM = "there is no --speculative-algorithm, so there is no speculation to switch"


def alias(name: str, draft: str | None, gemma4_drafts: Collection[str]) -> str:
    """The algorithm that ``--speculative-algorithm name`` means (`_resolve_speculative_algorithm_alias`).

    ``draft`` is the draft model's architecture, None when it is not known here; ``gemma4_drafts`` are those
    that the release moves from EAGLE to FROZEN_KV_MTP.
    """
    algorithm = name.upper()
    gemma4 = draft in gemma4_drafts
    if algorithm == "EAGLE3" and gemma4:
        raise StartError(f"the draft is {draft}, which SGLang takes with EAGLE or NEXTN, not with EAGLE3")
    if algorithm in ("EAGLE", "NEXTN"):
        return "FROZEN_KV_MTP" if gemma4 else "EAGLE"
    return algorithm


def say_algorithm(resolution: Resolution, name: str, algorithm: str, builtin: Collection[str]) -> None:
    """Notes the algorithm, and stops at one that SGLang does not have."""
    if algorithm not in builtin:
        raise StartError(f"SGLang has no speculative algorithm {name!r} (unless a plugin registers it)")
    resolution.args.speculative_algorithm = algorithm
    meaning = "" if name == algorithm else f", which SGLang takes as {algorithm}"
    resolution.reasons.append(f"--speculative-algorithm {name}{meaning}")


def resolve_draft_parameters(resolution: Resolution, target: str | None) -> None:
    """Steps, topk and draft tokens of EAGLE, EAGLE3 and STANDALONE.

    They stay None where the model decides and is not known here. SGLang chooses all three when
    --speculative-num-steps is missing (`auto_choose_speculative_params`), by the target's architecture; with
    it, topk must be given too (SGLang compares it unset and fails).
    """
    args = resolution.args
    if args.speculative_num_steps is None:
        if args.speculative_eagle_topk is not None or args.speculative_num_draft_tokens is not None:
            raise StartError("--speculative-num-steps is missing: give steps, topk and draft tokens, or none of them")
        if target is None and args.speculative_algorithm != "STANDALONE":
            resolution.unknown.append(
                "steps, topk, draft tokens are not given; SGLang chooses them by the target's architecture "
                "(5/4/8 for Llama and Grok, else 3/1/4)"
            )
            return
        tree = target in ("LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM")
        chosen = (5, 4, 8) if tree and args.speculative_algorithm != "STANDALONE" else (3, 1, 4)
        args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens = chosen
        resolution.reasons.append(
            f"steps, topk, draft tokens are not given: SGLang chooses {chosen} for {target or 'STANDALONE'}"
        )
    if args.speculative_eagle_topk is None:
        raise StartError("--speculative-num-steps without --speculative-eagle-topk: SGLang fails comparing topk")
    if args.speculative_eagle_topk == 1:
        _chain_length(resolution)


def _chain_length(resolution: Resolution) -> None:
    args = resolution.args
    assert args.speculative_num_steps is not None
    tokens = args.speculative_num_steps + 1
    given = args.speculative_num_draft_tokens
    if given is not None and given != tokens:
        resolution.warnings.append(
            f"--speculative-num-draft-tokens {given} becomes {tokens}: with topk 1 it is always steps + 1"
        )
    args.speculative_num_draft_tokens = tokens


def check_tree_backend(resolution: Resolution, paged_backends: tuple[str, ...]) -> None:
    """Stops at a tree (topk above 1) on an attention backend that SGLang refuses it on.

    ``paged_backends`` take a tree with a page size above 1. A backend or page size that SGLang is left to
    choose is not known here.
    """
    args = resolution.args
    topk = args.speculative_eagle_topk
    if topk is None or topk == 1:
        return
    backends = (args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend)
    if "trtllm_mha" in backends:
        raise StartError(f"topk {topk} on the attention backend trtllm_mha, which takes only topk 1")
    if args.page_size is None or args.page_size <= 1 or args.attention_backend in paged_backends:
        return
    if args.attention_backend is None and args.device != "cpu":
        resolution.unknown.append(
            f"page size {args.page_size} with topk {topk} is refused unless SGLang picks "
            f"{' or '.join(paged_backends)} for attention"
        )
        return
    raise StartError(
        f"topk {topk} with page size {args.page_size} works only with --attention-backend {' or '.join(paged_backends)}"
    )


def resolve_dflash(args: Settings) -> None:
    """DFLASH: steps and topk are 1; the draft tokens are the block size, which may come from the draft."""
    if args.speculative_draft_model_path is None:
        raise StartError("DFLASH needs --speculative-draft-model-path")
    block, tokens = args.speculative_dflash_block_size, args.speculative_num_draft_tokens
    if block is not None and (block <= 0 or tokens not in (None, block)):
        raise StartError(f"--speculative-dflash-block-size {block} is not positive or is not the draft tokens")
    args.speculative_num_steps = args.speculative_eagle_topk = 1
    args.speculative_num_draft_tokens = tokens if block is None else block


def refusal(args: Any, worker: Worker | None, supported: Collection[str], attention_dp: bool) -> str | None:
    """Why the switch cannot act with these resolved settings, where both releases agree; None when it can."""
    if worker is None:
        return NO_ALGORITHM
    if worker.name not in supported:
        return f"the switch does not support {worker.name} ({worker.file}); it acts in {' and '.join(supported)}"
    if attention_dp:
        return "data-parallel attention: an idle rank takes no decode step and would wait for the others"
    if args.pp_size > 1:
        return f"pipeline parallel (--pp-size {args.pp_size}): its stages hold different batches at one time"
    if args.disaggregation_mode != "null":
        return f"--disaggregation-mode {args.disaggregation_mode}: not supported"
    if args.enable_two_batch_overlap:
        return "--enable-two-batch-overlap wraps the attention backend that a plain step brings its own of"
    if args.enable_pdmux:
        return "--enable-pdmux keeps attention backends of its own, which a plain step does not replace"
    if args.use_ray:
        return "--use-ray: its scheduler actors load no plugins, so the switch would not be in them"
    if uses_lora(args):
        return "LoRA: its CUDA graph metadata has one width a request, and building the plain step's would overwrite it"
    if args.enable_hisparse:
        return "--enable-hisparse: its swap state is sized at start for one number of draft tokens"
    if args.speculative_adaptive:
        return "--speculative-adaptive is in force: two controllers would set the number of draft steps; drop it"
    return None


def uses_lora(args: Any) -> bool:
    """As `check_lora_server_args` will resolve it, later than the rules and the plugin look."""
    return bool(args.enable_lora or (args.enable_lora is None and args.lora_paths))


def default_ceiling(args: Settings, below_35_gib: tuple[int, int]) -> GraphCeiling:
    """SGLang's default CUDA graph ceiling by GPU memory (its `handle_gpu_memory_settings`).

    ``below_35_gib``: the release's ceiling on such GPUs with tensor parallel below 4, and from 4 on.
    """
    sizes = (8, below_35_gib[0], 32, 256, 512) if args.tp_size < 4 else (8, below_35_gib[1], 160, 512, 512)
    return GraphCeiling(
        min(sizes),
        max(sizes),
        f"not given, so SGLang takes {'/'.join(map(str, sizes))} on a GPU below 20/35/60/160/above 160 GiB",
    )
