"""The server settings that decide the worker path, and what is noted while SGLang's rules are applied."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Settings:
    """The fields of SGLang's ServerArgs that the rules read, under SGLang's names and with its defaults.

    One class for both releases; a field that only one of them has says so.
    """

    model_path: str | None = None
    device: str | None = None
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    enable_dp_attention: bool = False
    attn_dp_size: int = 1  # 0.5.23
    disaggregation_mode: str = "null"
    enable_two_batch_overlap: bool = False
    enable_pdmux: bool = False
    enable_hisparse: bool = False
    use_ray: bool = False
    enable_mixed_chunk: bool = False
    dllm_algorithm: str | None = None
    enable_lora: bool | None = None
    lora_paths: list[str] | None = None
    disable_overlap_schedule: bool = False
    max_running_requests: int | None = None
    page_size: int | None = None
    disable_radix_cache: bool = False
    mamba_radix_cache_strategy: str = "auto"  # 0.5.23
    linear_attn_backend: str = "triton"
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    disable_cuda_graph: bool = False
    cuda_graph_max_bs: int | None = None  # 0.5.12
    cuda_graph_bs: list[int] | None = None  # 0.5.12
    cuda_graph_config: str | None = None  # 0.5.23, JSON
    cuda_graph_backend_decode: str | None = None  # 0.5.23
    cuda_graph_max_bs_decode: int | None = None  # 0.5.23
    cuda_graph_bs_decode: list[int] | None = None  # 0.5.23
    disable_decode_cuda_graph: bool = False  # 0.5.23
    enable_return_aux_hidden_states: bool = False  # 0.5.23
    enable_multi_layer_eagle: bool = False
    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_draft_tokens: int | None = None
    speculative_dflash_block_size: int | None = None
    speculative_ngram_max_bfs_breadth: int = 10
    speculative_adaptive: bool = False
    speculative_adaptive_config: str | None = None
    speculative_skip_dp_mlp_sync: bool = False  # 0.5.12
    speculative_use_rejection_sampling: bool = False  # 0.5.23
    speculative_use_block_verification: bool = False  # 0.5.23


@dataclass(frozen=True)
class Worker:
    """A speculative worker: its class and its file, relative to site-packages."""

    name: str
    file: str


@dataclass(frozen=True)
class GraphCeiling:
    """Largest decode batch with a CUDA graph: from ``low`` to ``high``, which differ when the GPU decides."""

    low: int
    high: int
    why: str


class StartError(Exception):
    """SGLang ends the start with these settings; the message says why."""


@dataclass
class Resolution:
    """Settings as SGLang resolves them, with a reason for each step it takes on the way."""

    args: Settings
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    overlap_reason: str = "nothing turns it off"
    start_error: str | None = None  # why SGLang ends the start; the settings are then as far as it got

    def turn_overlap_off(self, reason: str) -> None:
        """Overlap off; the first reason is the one that counts, as in SGLang's own log line."""
        if not self.args.disable_overlap_schedule:
            self.args.disable_overlap_schedule = True
            self.overlap_reason = reason

    def cap_running_requests(self, cap: int, why: str) -> None:
        """SGLang's cap for a server that was started without --max-running-requests."""
        if self.args.max_running_requests is not None:
            return
        self.args.max_running_requests = cap
        self.warnings.append(
            f"running requests are capped at {cap}: {why} and --max-running-requests is not given; "
            "give it to admit more"
        )


def start(asked: Settings) -> Resolution:
    """A resolution of a copy of ``asked``, before any rule."""
    resolution = Resolution(dataclasses.replace(asked))
    args = resolution.args
    if args.device is not None:
        args.device = args.device.split(":")[0]
    elif args.speculative_algorithm is not None:
        resolution.reasons.append("--device is not given: a GPU is assumed")
    if args.disable_overlap_schedule:
        resolution.overlap_reason = "--disable-overlap-schedule"
    return resolution


def architecture(model_path: str | None) -> str | None:
    """The model's first architecture from config.json when ``model_path`` is a local folder, else None.

    Raises ValueError when the folder has a config.json that cannot be read.
    """
    if model_path is None:
        return None
    config = Path(model_path) / "config.json"
    if not config.is_file():
        return None
    try:
        architectures = json.loads(config.read_text(encoding="utf-8")).get("architectures")
    except (ValueError, AttributeError, OSError) as error:
        raise ValueError(f"{config} is not a model's config.json: {error}") from error
    return str(architectures[0]) if architectures else None
