"""Which worker SGLang 0.5.12 runs, and whether with overlap.

Follows `ServerArgs.__post_init__` in srt/server_args.py, step by step in its order (a step looks at what the
steps before it left, and at nothing a later one sets), and `SpeculativeAlgorithm.create_worker` in
srt/speculative/spec_info.py. SGLang's checks that neither move the worker path nor concern speculation are
not repeated here; SGLang reports those itself.
"""

from collections.abc import Mapping
from typing import Any

from specdec.worker_path import environment
from specdec.worker_path import rules_common as common
from specdec.worker_path.settings import GraphCeiling, Resolution, Settings, StartError, Worker, start

RELEASE = "0.5.12"
V2_VARIABLE = "SGLANG_ENABLE_SPEC_V2"

_FILES = {
    "EAGLEWorker": "eagle_worker.py",
    "EAGLEWorkerV2": "eagle_worker_v2.py",
    "MultiLayerEagleWorker": "multi_layer_eagle_worker.py",
    "MultiLayerEagleWorkerV2": "multi_layer_eagle_worker_v2.py",
    "StandaloneWorker": "standalone_worker.py",
    "StandaloneWorkerV2": "standalone_worker_v2.py",
    "DFlashWorker": "dflash_worker.py",
    "FrozenKVMTPWorker": "frozen_kv_mtp_worker.py",
    "NGRAMWorker": "ngram_worker.py",
}
_ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE", "DFLASH", "FROZEN_KV_MTP", "NGRAM", "NONE")
SUPPORTED_WORKERS = ("EAGLEWorker", "EAGLEWorkerV2")


def resolved(server_args: Any) -> Any:
    """This release's ServerArgs resolves itself, in its constructor."""
    return server_args


def worker(args: Any) -> Worker | None:
    """`create_worker` on resolved settings (SGLang's ServerArgs or ours); None without speculation."""
    algorithm = args.speculative_algorithm
    if algorithm in (None, "NONE"):
        return None
    if algorithm in ("EAGLE", "EAGLE3"):
        name = "MultiLayerEagleWorker" if args.enable_multi_layer_eagle else "EAGLEWorker"
    else:
        name = {
            "STANDALONE": "StandaloneWorker",
            "DFLASH": "DFlashWorker",
            "FROZEN_KV_MTP": "FrozenKVMTPWorker",
            "NGRAM": "NGRAMWorker",
        }.get(algorithm, "")
    if not name:
        return Worker(f"the worker of a plugin's algorithm {algorithm}", "unknown")
    if not args.disable_overlap_schedule:
        name += "V2"
    return Worker(name, f"sglang/srt/speculative/{_FILES[name]}")


def refusal(args: Any) -> str | None:
    """Why the switch cannot act with resolved settings (SGLang's ServerArgs or ours); None when it can."""
    running = worker(args)
    reason = common.refusal(args, running, SUPPORTED_WORKERS, attention_dp=args.enable_dp_attention)
    if reason is not None or running is None or running.name != "EAGLEWorkerV2":
        return reason
    topk = args.speculative_eagle_topk
    if topk is None:
        return (
            "EAGLEWorkerV2 takes only topk 1, and SGLang chooses topk by the model, which is not known here; "
            "give --speculative-num-steps and --speculative-eagle-topk"
        )
    if topk > 1:
        # SGLang takes overlap off for a topk the user gave, but chooses a missing one only after that. Its
        # `_resolve_spec_overlap_tokens` then takes a request's first tokens, as many as were accepted: in a
        # chain these are the accepted ones, in a tree they are not.
        return (
            f"topk {topk} on EAGLEWorkerV2, which returns wrong tokens for a topk above 1 (SGLang chose topk "
            "after it had left overlap on); two ways out: --speculative-eagle-topk 1 with "
            f"--speculative-num-steps keeps EAGLEWorkerV2, {V2_VARIABLE}=0 runs the tree in EAGLEWorker"
        )
    return None


def overlap_reason(args: Any, env: Mapping[str, str]) -> str:
    """Why overlap is on or off, as far as resolved settings still tell."""
    if not args.disable_overlap_schedule:
        return "nothing turns it off"
    if args.pp_size > 1:
        return f"--pp-size {args.pp_size}"
    if args.speculative_algorithm in ("DFLASH", "FROZEN_KV_MTP", "NGRAM"):
        return f"{args.speculative_algorithm} runs without overlap"
    if args.speculative_algorithm in ("EAGLE", "EAGLE3", "STANDALONE"):
        if not environment.truth(env, V2_VARIABLE, default=True):
            return f"{V2_VARIABLE}={env[V2_VARIABLE]}"
        if (args.speculative_eagle_topk or 1) > 1:
            return f"topk {args.speculative_eagle_topk} is above 1"
    return "--disable-overlap-schedule, or the model or device"


def resolve(asked: Settings, env: Mapping[str, str], target: str | None, draft: str | None) -> Resolution:
    """The settings as SGLang 0.5.12 resolves them.

    ``target`` and ``draft`` are the models' architectures, None when not known here.
    """
    resolution = start(asked)
    resolution.warnings += environment.ill_typed(env, V2_VARIABLE, default=True)
    try:
        use_v2 = _before_speculation(resolution, env, target)
        _speculation(resolution, env, target, draft, use_v2)
        _after_speculation(resolution)
    except StartError as error:
        resolution.start_error = str(error)
    return resolution


def _before_speculation(resolution: Resolution, env: Mapping[str, str], target: str | None) -> bool:
    """Device, model and parallelism; returns whether SGLANG_ENABLE_SPEC_V2 stands."""
    args = resolution.args
    use_v2 = environment.truth(env, V2_VARIABLE, default=True)
    if args.device == "mps" and not environment.truth(env, "SGLANG_USE_MLX", default=False):
        resolution.turn_overlap_off("device mps")
    # The model's own rules compare the algorithm as it was typed, before NEXTN or lower case become EAGLE.
    typed = args.speculative_algorithm
    if target == common.DEEPSEEK_V4:
        resolution.cap_running_requests(common.DEEPSEEK_V4_CAP, f"{target} sets it")
        if typed is not None:
            if typed != "EAGLE" or args.speculative_eagle_topk != 1:
                raise StartError(f"{target} takes only --speculative-algorithm EAGLE with --speculative-eagle-topk 1")
            if not use_v2:
                resolution.warnings.append(f"{V2_VARIABLE}={env[V2_VARIABLE]} is overridden: {target} turns v2 on")
            use_v2 = True
    multi_layer = target is not None and (target.startswith("MiMoV2") or "Step3p5ForCausalLM" in target)
    if multi_layer and typed == "EAGLE":
        args.enable_multi_layer_eagle = True
        resolution.reasons.append(f"{target} with --speculative-algorithm EAGLE turns multi-layer EAGLE on")
    if "SGLANG_EMBEDDINGS_SPARSE_HEAD" in env:
        resolution.turn_overlap_off("SGLANG_EMBEDDINGS_SPARSE_HEAD is set")
    if args.dp_size == 1:
        args.enable_dp_attention = False
    if args.enable_dp_attention and args.tp_size % args.dp_size:
        raise StartError(f"--enable-dp-attention needs --tp-size divisible by --dp-size {args.dp_size}")
    if args.pp_size > 1:
        resolution.turn_overlap_off(f"--pp-size {args.pp_size}")
    return use_v2


def _speculation(
    resolution: Resolution, env: Mapping[str, str], target: str | None, draft: str | None, use_v2: bool
) -> None:
    """`_handle_speculative_decoding`."""
    args = resolution.args
    typed = args.speculative_algorithm
    if typed is not None:
        algorithm = common.alias(typed, draft, ("Gemma4AssistantForCausalLM",))
        common.say_algorithm(resolution, typed, algorithm, _ALGORITHMS)
        if typed == "EAGLE" and target is None:
            resolution.unknown.append(
                "with --speculative-algorithm EAGLE a MiMoV2 or Step3p5 target runs multi-layer EAGLE"
            )
    if args.speculative_skip_dp_mlp_sync and args.speculative_algorithm != "EAGLE":
        raise StartError("--speculative-skip-dp-mlp-sync is only for --speculative-algorithm EAGLE")
    if args.speculative_algorithm in ("DFLASH", "FROZEN_KV_MTP", "NGRAM"):
        _without_overlap(resolution)
    elif args.speculative_algorithm in ("EAGLE", "EAGLE3", "STANDALONE"):
        _eagle_family(resolution, env, target, use_v2)
    if args.speculative_adaptive:
        _adaptive(resolution)
    running = worker(args)
    if running is not None and running.name == "MultiLayerEagleWorker":
        resolution.warnings.append(
            "MultiLayerEagleWorker cannot be imported under Python below 3.14: its file lacks ModelRunner"
        )


def _without_overlap(resolution: Resolution) -> None:
    args = resolution.args
    algorithm = args.speculative_algorithm
    if algorithm == "NGRAM" and args.device not in (None, "cuda"):
        raise StartError(f"NGRAM needs device cuda, not {args.device}")
    if algorithm in ("DFLASH", "NGRAM") and args.enable_dp_attention:
        raise StartError(f"{algorithm} does not go with data-parallel attention")
    if algorithm == "DFLASH":
        if args.pp_size > 1:
            raise StartError("DFLASH does not go with --pp-size above 1")
        common.resolve_dflash(args)
    if algorithm == "NGRAM":
        args.speculative_eagle_topk = args.speculative_ngram_max_bfs_breadth
        if args.speculative_num_draft_tokens is None:
            args.speculative_num_draft_tokens = 12
        common.check_tree_backend(resolution, ("flashinfer",))
    resolution.cap_running_requests(common.SPECULATION_CAP, "speculation sets it")
    resolution.turn_overlap_off(f"{algorithm} runs without overlap")


def _eagle_family(resolution: Resolution, env: Mapping[str, str], target: str | None, use_v2: bool) -> None:
    args = resolution.args
    if args.speculative_algorithm == "STANDALONE" and args.enable_dp_attention:
        raise StartError("STANDALONE does not go with data-parallel attention")
    resolution.cap_running_requests(common.SPECULATION_CAP, "speculation sets it")
    topk = args.speculative_eagle_topk
    asked_v2 = V2_VARIABLE in env and environment.truth(env, V2_VARIABLE, default=False)
    if asked_v2 and args.disable_overlap_schedule:
        resolution.warnings.append(
            f"{V2_VARIABLE}={env[V2_VARIABLE]} does nothing here: overlap is off "
            f"({resolution.overlap_reason}), and v2 runs only with overlap"
        )
    elif asked_v2 and topk is not None and topk > 1:
        resolution.warnings.append(
            f"{V2_VARIABLE}={env[V2_VARIABLE]} asks for v2, but topk {topk} is above 1: SGLang runs v1; "
            "--speculative-eagle-topk 1 would run v2"
        )
    if topk is not None and topk > 1:
        resolution.turn_overlap_off(f"topk {topk} is above 1, and v2 takes only topk 1")
    elif not use_v2:
        resolution.turn_overlap_off(f"{V2_VARIABLE}={env[V2_VARIABLE]}")
    # Only now: a topk that SGLang chooses itself no longer turns overlap off.
    common.resolve_draft_parameters(resolution, target)
    common.check_tree_backend(resolution, ("flashinfer", "fa3"))


def _adaptive(resolution: Resolution) -> None:
    """`adaptive_unsupported_reason`: SGLang drops adaptive with a log line and starts all the same."""
    args = resolution.args
    reason = None
    if args.speculative_algorithm not in ("EAGLE", "EAGLE3"):
        reason = f"the algorithm is {args.speculative_algorithm}"
    elif args.speculative_eagle_topk is None:
        resolution.unknown.append("--speculative-adaptive stays only if the topk that SGLang chooses is 1")
        return
    elif args.speculative_eagle_topk != 1:
        reason = f"topk is {args.speculative_eagle_topk}, not 1"
    elif args.enable_dp_attention:
        reason = "data-parallel attention"
    elif args.enable_multi_layer_eagle:
        reason = "multi-layer EAGLE"
    elif args.enable_two_batch_overlap or args.enable_pdmux:
        reason = "two-batch overlap or PD multiplexing"
    args.speculative_adaptive = reason is None
    if reason is None:
        resolution.reasons.append(
            "--speculative-adaptive is in force (1/3/7 steps by default; it has no zero-step tier)"
        )
    else:
        resolution.warnings.append(f"--speculative-adaptive is dropped by SGLang: {reason}")


def _after_speculation(resolution: Resolution) -> None:
    """What ends the start later, in `check_server_args`, and diffusion's overlap rule."""
    args = resolution.args
    if args.dllm_algorithm is not None:
        resolution.turn_overlap_off("--dllm-algorithm")
    if args.speculative_algorithm is None:
        return
    if args.pp_size > 1:
        raise StartError("speculation does not go with --pp-size above 1")
    if (args.enable_lora or (args.enable_lora is None and args.lora_paths)) and args.speculative_algorithm != "NGRAM":
        raise StartError(f"LoRA goes only with NGRAM, not with {args.speculative_algorithm}")


def graph_ceiling(args: Settings) -> GraphCeiling | None:
    """The decode CUDA graph's largest batch; None on the CPU, which has no CUDA graphs."""
    if args.device == "cpu":
        return None
    if args.disable_cuda_graph:
        return GraphCeiling(0, 0, "--disable-cuda-graph")
    if args.cuda_graph_bs:
        return GraphCeiling(max(args.cuda_graph_bs), max(args.cuda_graph_bs), "--cuda-graph-bs")
    if args.cuda_graph_max_bs is not None:
        return GraphCeiling(args.cuda_graph_max_bs, args.cuda_graph_max_bs, "--cuda-graph-max-bs")
    return common.default_ceiling(args, below_35_gib=(24, 80))
