"""Which worker SGLang 0.5.23 runs, and whether with overlap.

Follows `run_resolution_pipeline` in srt/arg_groups/pipeline.py, step by step in its order, with
`handle_speculative_decoding` in srt/arg_groups/speculative_hook.py, and `SpeculativeAlgorithm.create_worker`
in srt/speculative/spec_info.py. There is one worker per algorithm, which the scheduler drives with overlap or
without. SGLang's checks that neither move the worker path nor concern speculation are not repeated here, nor
are the many of UNO and DSPARK, whose workers the switch does not support; SGLang reports those itself.

Its ServerArgs keeps what the user typed beside what was resolved: `resolved` gives the latter.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.worker_path import environment
from specdec.worker_path import rules_common as common
from specdec.worker_path.settings import GraphCeiling, Resolution, Settings, StartError, Worker, start

RELEASE = "0.5.23"

_WORKERS = {
    "EAGLE": Worker("EAGLEWorkerV2", "sglang/srt/speculative/eagle_worker_v2.py"),
    "EAGLE3": Worker("EAGLEWorkerV2", "sglang/srt/speculative/eagle_worker_v2.py"),
    "STANDALONE": Worker("StandaloneWorkerV2", "sglang/srt/speculative/standalone_worker_v2.py"),
    "DFLASH": Worker("DFlashWorkerV2", "sglang/srt/speculative/dflash_worker_v2.py"),
    "DSPARK": Worker("DSparkWorkerV2", "sglang/srt/speculative/dspark_components/dspark_worker_v2.py"),
    "UNO": Worker("UnoWorkerV2", "sglang/srt/speculative/uno_worker_v2.py"),
    "FROZEN_KV_MTP": Worker("FrozenKVMTPWorkerV2", "sglang/srt/speculative/frozen_kv_mtp_worker_v2.py"),
    "NGRAM": Worker("NGRAMWorker", "sglang/srt/speculative/ngram_worker.py"),
}
_MULTI_LAYER = Worker("MultiLayerEagleWorkerV2", "sglang/srt/speculative/multi_layer_eagle_worker_v2.py")
_GEMMA4_DRAFTS = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
_MULTI_LAYER_MODELS = (
    "MiMoV2",
    "GigaChat35ForCausalLM",
    "Step3p5ForCausalLM",
    "Step3p7ForConditionalGeneration",
)
# Hybrids of attention and a recurrent state. First those whose prefix cache works only without overlap.
_HYBRIDS_WITHOUT_BUFFER = (
    "GigaChat35ForCausalLM",
    "GigaChat35ForCausalLMNextN",
    "InternS2MobiusForConditionalGeneration",
    "JetNemotronForCausalLM",
    "JetVLMForConditionalGeneration",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "ZayaForCausalLM",
)
_HYBRIDS = (
    "BailingMoeV2_5ForCausalLM",
    "BailingMoeV3ForCausalLM",
    "BailingMoeV3VLForConditionalGeneration",
    "FalconH1ForCausalLM",
    "Glm5NextForConditionalGeneration",
    "InternS2PreviewForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
    "KimiLinearForCausalLM",
    "MiniCPMV4_6ForConditionalGeneration",
    "MiniCPMV4_7ForConditionalGeneration",
    "NemotronHForCausalLM",
    "NemotronHPuzzleForCausalLM",
    "NemotronH_Omni_Reasoning_V3",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForConditionalGeneration",
)
_NO_OVERLAP_ON_CPU = ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM")
_DEVICES = {  # where SGLang starts an algorithm that is not everywhere
    "NGRAM": ("cuda", "cpu", "xpu"),
    "DFLASH": ("cuda", "npu", "xpu"),
    "DSPARK": ("cuda", "npu", "xpu"),
    "UNO": ("cuda",),
}
SUPPORTED_WORKERS = ("EAGLEWorkerV2",)


def resolved(server_args: Any) -> Any:
    """The resolved settings of SGLang's own ServerArgs; any other object is taken as resolved already.

    Raises ValueError for a ServerArgs that SGLang has not resolved yet (`resolve_once`).
    """
    finished = getattr(server_args, "_resolution_finished", None)
    if finished is None and not type(server_args).__module__.startswith("sglang."):
        return server_args
    if not finished:
        raise ValueError("SGLang has not resolved these ServerArgs yet: call their resolve_once() first")
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)


def worker(args: Any) -> Worker | None:
    """`create_worker` on resolved settings; None without speculation."""
    algorithm = args.speculative_algorithm
    if algorithm in (None, "NONE"):
        return None
    if algorithm in ("EAGLE", "EAGLE3") and args.enable_multi_layer_eagle:
        return _MULTI_LAYER
    return _WORKERS.get(algorithm, Worker(f"the worker of a plugin's algorithm {algorithm}", "unknown"))


def refusal(args: Any) -> str | None:
    """Why the switch cannot act with resolved settings; None when it can."""
    # A dump of resolved settings (/server_info) carries both spellings of attention DP.
    attention_dp = args.attn_dp_size > 1 or bool(args.enable_dp_attention)
    reason = common.refusal(args, worker(args), SUPPORTED_WORKERS, attention_dp)
    if reason is None and args.speculative_use_rejection_sampling:
        return (
            "rejection sampling (--speculative-use-rejection-sampling, or what turns it on): it needs the draft's "
            "probabilities, and a plain step has no draft"
        )
    return reason


def overlap_reason(args: Any, env: Mapping[str, str]) -> str:
    """Why overlap is on or off, as far as resolved settings still tell; no variable of ``env`` decides it."""
    if not args.disable_overlap_schedule:
        return "nothing turns it off"
    if args.pp_size > 1:
        return f"--pp-size {args.pp_size}"
    if args.device == "cpu" and args.speculative_algorithm in _NO_OVERLAP_ON_CPU:
        return "SGLang has no overlap for speculation on the CPU"
    return "--disable-overlap-schedule, or the model or device"


def resolve(asked: Settings, env: Mapping[str, str], target: str | None, draft: str | None) -> Resolution:
    """The settings as SGLang 0.5.23 resolves them.

    ``target`` and ``draft`` are the models' architectures, None when not known here.
    """
    resolution = start(asked)
    try:
        _before_speculation(resolution, env, target)
        _speculation(resolution, env, target, draft)
        _after_speculation(resolution, env)
    except StartError as error:
        resolution.start_error = str(error)
    return resolution


def _before_speculation(resolution: Resolution, env: Mapping[str, str], target: str | None) -> None:
    """Parallelism, hidden-state capture, device and model."""
    args = resolution.args
    if args.enable_dp_attention:  # the old spelling of --attn-dp-size
        if args.attn_dp_size == 1:
            args.attn_dp_size, args.dp_size = args.dp_size, 1
        args.enable_dp_attention = False
    if args.attn_dp_size < 1 or (args.attn_dp_size > 1 and args.dp_size > 1) or args.tp_size % args.attn_dp_size:
        raise StartError(
            f"--attn-dp-size {args.attn_dp_size} must be at least 1, divide --tp-size {args.tp_size}, and go "
            f"without --dp-size {args.dp_size}"
        )
    typed = args.speculative_algorithm
    if args.enable_return_aux_hidden_states and typed is not None:
        resolution.reasons.append(
            f"--enable-return-aux-hidden-states: --speculative-algorithm {typed} only names what is captured"
        )
        args.speculative_algorithm = typed = None
    if args.device == "mps" and not environment.truth(env, "SGLANG_USE_MLX", default=False):
        resolution.turn_overlap_off("device mps")
    # The model's own rules compare the algorithm as it was typed, before NEXTN or lower case become EAGLE.
    if target is not None and typed == "EAGLE" and any(name in target for name in _MULTI_LAYER_MODELS):
        args.enable_multi_layer_eagle = True
        resolution.reasons.append(f"{target} with --speculative-algorithm EAGLE turns multi-layer EAGLE on")
    if target == common.DEEPSEEK_V4:
        resolution.cap_running_requests(common.DEEPSEEK_V4_CAP, f"{target} sets it")
        if typed not in (None, "EAGLE", "DSPARK") or (typed == "EAGLE" and args.speculative_eagle_topk != 1):
            raise StartError(f"{target} takes only DSPARK, or EAGLE with --speculative-eagle-topk 1")
    _hybrid_overlap(resolution, target)
    if "SGLANG_EMBEDDINGS_SPARSE_HEAD" in env:
        resolution.turn_overlap_off("SGLANG_EMBEDDINGS_SPARSE_HEAD is set")
    if args.pp_size > 1:
        resolution.turn_overlap_off(f"--pp-size {args.pp_size}")


def _hybrid_overlap(resolution: Resolution, target: str | None) -> None:
    """`_mamba_radix_cache_resolution`: the prefix cache of a hybrid model that cannot double its buffers."""
    args = resolution.args
    if target not in _HYBRIDS + _HYBRIDS_WITHOUT_BUFFER or args.disable_radix_cache:
        return
    doubles = target in _HYBRIDS and args.linear_attn_backend == "triton"
    if args.mamba_radix_cache_strategy == "auto" and not doubles:
        resolution.turn_overlap_off(f"{target}'s prefix cache; --disable-radix-cache would keep it on")


def _speculation(resolution: Resolution, env: Mapping[str, str], target: str | None, draft: str | None) -> None:
    """`handle_speculative_decoding`: adaptive is decided first, then the algorithm's own handler runs."""
    args = resolution.args
    typed = args.speculative_algorithm
    if typed is not None:
        algorithm = common.alias(typed, draft, _GEMMA4_DRAFTS)
        common.say_algorithm(resolution, typed, algorithm, (*_WORKERS, "NONE"))
        if typed == "EAGLE" and target is None:
            resolution.unknown.append(
                "with --speculative-algorithm EAGLE a MiMoV2, GigaChat35, Step3p5 or Step3p7 target runs "
                "multi-layer EAGLE"
            )
    if args.speculative_use_block_verification:
        _block_verification(args)
    if args.speculative_adaptive:
        _adaptive(resolution)
    if args.speculative_algorithm in ("EAGLE", "EAGLE3", "STANDALONE"):
        _eagle_family(resolution, target)
    elif args.speculative_algorithm not in (None, "NONE"):
        _other_algorithm(resolution)


def _block_verification(args: Settings) -> None:
    if args.speculative_algorithm not in ("EAGLE", "EAGLE3", "DFLASH", "DSPARK"):
        raise StartError("--speculative-use-block-verification needs EAGLE, EAGLE3, DFLASH or DSPARK")
    if args.device not in (None, "cuda"):
        raise StartError(f"--speculative-use-block-verification needs device cuda, not {args.device}")
    if args.speculative_algorithm in ("EAGLE", "EAGLE3"):
        args.speculative_use_rejection_sampling = True


def _adaptive(resolution: Resolution) -> None:
    """`adaptive_unsupported_reason`: adaptive stays, or SGLang drops it, logs that and starts without it.

    Unlike in 0.5.12 this is decided before SGLang would choose topk, so that a missing topk becomes 1.
    """
    args = resolution.args
    reason = None
    if args.speculative_algorithm not in ("EAGLE", "EAGLE3"):
        reason = f"the algorithm is {args.speculative_algorithm}"
    elif args.speculative_eagle_topk not in (None, 1):
        reason = f"topk is {args.speculative_eagle_topk}, not 1"
    elif args.attn_dp_size > 1:
        reason = "data-parallel attention"
    elif args.enable_multi_layer_eagle:
        reason = "multi-layer EAGLE"
    elif args.enable_two_batch_overlap or args.enable_pdmux:
        reason = "two-batch overlap or PD multiplexing"
    if reason is not None:
        args.speculative_adaptive = False
        resolution.warnings.append(f"--speculative-adaptive is dropped by SGLang: {reason}")
        return
    candidates = _candidate_steps(args.speculative_adaptive_config)
    args.speculative_eagle_topk = 1
    if args.speculative_num_steps is None:
        args.speculative_num_steps = candidates[len(candidates) // 2]
    if args.speculative_num_steps not in candidates:
        raise StartError(f"--speculative-num-steps {args.speculative_num_steps} is not one of adaptive's {candidates}")
    args.speculative_num_draft_tokens = args.speculative_num_steps + 1
    switches_off = ", 0 among them: SGLang's own switch" if 0 in candidates else ""
    resolution.reasons.append(f"--speculative-adaptive is in force, with steps {candidates}{switches_off}")


def _candidate_steps(config_path: str | None) -> list[int]:
    """The steps that adaptive may use at any batch size: the release's defaults or the file's."""
    if config_path is None:
        return [0, 1, 3, 5, 7]
    try:
        entries = json.loads(Path(config_path).read_text(encoding="utf-8"))
        steps = {step for key, entry in entries.items() if key.isdigit() for step in entry["candidate_steps"]}
        if not steps or not all(isinstance(step, int) and step >= 0 for step in steps):
            raise ValueError('wants e.g. {"1": {"candidate_steps": [1, 3]}, "9": {"candidate_steps": [0]}}')
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartError(f"--speculative-adaptive-config {config_path} cannot be used: {error}") from error
    return sorted(steps)


def _eagle_family(resolution: Resolution, target: str | None) -> None:
    """`_handle_eagle_family`."""
    args = resolution.args
    if args.speculative_algorithm == "STANDALONE" and args.attn_dp_size > 1:
        raise StartError("STANDALONE does not go with data-parallel attention")
    resolution.cap_running_requests(common.SPECULATION_CAP, "speculation sets it")
    _cpu_overlap(resolution)
    common.resolve_draft_parameters(resolution, target)
    if args.speculative_use_rejection_sampling and (
        args.speculative_algorithm == "STANDALONE" or args.speculative_eagle_topk not in (None, 1)
    ):
        raise StartError("--speculative-use-rejection-sampling needs EAGLE or EAGLE3 and topk 1")
    common.check_tree_backend(resolution, ("flashinfer", "fa3", "triton"))
    if args.enable_mixed_chunk and args.speculative_algorithm != "STANDALONE":
        resolution.warnings.append(
            "--enable-mixed-chunk: a step that mixes prefill and decode decodes one token per request, "
            "whatever the threshold"
        )


def _other_algorithm(resolution: Resolution) -> None:
    args = resolution.args
    algorithm = str(args.speculative_algorithm)
    devices = _DEVICES.get(algorithm)
    if devices and args.device is not None and args.device not in devices:
        raise StartError(f"{algorithm} needs device {' or '.join(devices)}, not {args.device}")
    if algorithm == "DFLASH":
        if args.pp_size > 1:
            raise StartError("DFLASH does not go with --pp-size above 1")
        common.resolve_dflash(args)
    if algorithm == "NGRAM":
        _cpu_overlap(resolution)
        if args.attn_dp_size > 1:
            raise StartError("NGRAM does not go with data-parallel attention")
        args.speculative_eagle_topk = args.speculative_ngram_max_bfs_breadth
        if args.speculative_num_draft_tokens is None:
            args.speculative_num_draft_tokens = 12
        if args.speculative_num_steps is None:
            args.speculative_num_steps = args.speculative_num_draft_tokens // args.speculative_eagle_topk
        common.check_tree_backend(resolution, ("flashinfer",))
    if algorithm != "UNO":
        resolution.cap_running_requests(common.SPECULATION_CAP, "speculation sets it")


def _cpu_overlap(resolution: Resolution) -> None:
    if resolution.args.device == "cpu":
        resolution.turn_overlap_off("SGLang has no overlap for speculation on the CPU")


def _after_speculation(resolution: Resolution, env: Mapping[str, str]) -> None:
    """What ends the start later, in `check_server_args`, and diffusion's overlap rule."""
    args = resolution.args
    if args.dllm_algorithm is not None:
        resolution.turn_overlap_off("--dllm-algorithm")
    if args.speculative_algorithm is None:
        return
    if args.pp_size > 1:
        _check_pipeline_parallel(args, environment.truth(env, "SGLANG_ENABLE_PP_SPEC", default=False))
    if common.uses_lora(args):
        lora = ("EAGLE", "EAGLE3", "DFLASH", "DSPARK", "NGRAM")
        if args.speculative_algorithm not in lora or args.speculative_adaptive:
            raise StartError(f"LoRA goes only with {', '.join(lora)}, and not with --speculative-adaptive")


def _check_pipeline_parallel(args: Settings, pp_spec: bool) -> None:
    if args.speculative_algorithm != "EAGLE" or args.enable_multi_layer_eagle:
        raise StartError(f"--pp-size {args.pp_size} goes only with single-layer EAGLE (not EAGLE3)")
    if not pp_spec and args.disaggregation_mode != "prefill":
        raise StartError(
            f"--pp-size {args.pp_size} with speculation needs --disaggregation-mode prefill or SGLANG_ENABLE_PP_SPEC=1"
        )
    if pp_spec and (args.disaggregation_mode != "null" or args.speculative_adaptive or args.attn_dp_size > 1):
        raise StartError(
            "SGLANG_ENABLE_PP_SPEC goes neither with --disaggregation-mode nor --speculative-adaptive nor "
            "data-parallel attention"
        )


def graph_ceiling(args: Settings) -> GraphCeiling | None:
    """The decode CUDA graph's largest batch; None on the CPU, which has no CUDA graphs.

    Raises ValueError for a --cuda-graph-config that is not JSON.
    """
    if args.device == "cpu":
        return None
    try:
        decode = json.loads(args.cuda_graph_config or "{}").get("decode", {})
    except (ValueError, AttributeError) as error:
        raise ValueError(f"--cuda-graph-config wants a JSON object: {error}") from error
    backend = decode.get("backend", args.cuda_graph_backend_decode)
    if backend is None and (args.disable_decode_cuda_graph or args.disable_cuda_graph):
        backend = "disabled"
    if backend == "disabled":
        return GraphCeiling(0, 0, "decode CUDA graphs are disabled")
    batches = decode.get("bs", args.cuda_graph_bs_decode)
    if batches:
        return GraphCeiling(max(batches), max(batches), "--cuda-graph-bs-decode")
    largest = decode.get("max_bs", args.cuda_graph_max_bs_decode)
    if largest is not None:
        return GraphCeiling(largest, largest, "--cuda-graph-max-bs-decode")
    return common.default_ceiling(args, below_35_gib=(48, 160))
