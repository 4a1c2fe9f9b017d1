"""Which worker a server command runs: the answer as data, and its text for people."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from specdec.worker_path import environment, rules_0_5_12, rules_0_5_23, server_flags
from specdec.worker_path.settings import GraphCeiling, Settings, architecture

RULES: dict[str, ModuleType] = {rules_0_5_12.RELEASE: rules_0_5_12, rules_0_5_23.RELEASE: rules_0_5_23}
RELEASES = tuple(RULES)


@dataclass(frozen=True)
class WorkerPath:
    """What SGLang ``release`` does with a server command.

    ``worker_class`` and ``worker_file`` (relative to site-packages) are None without speculation, and when
    SGLang ends the start, which ``start_error`` then explains. ``unknown`` lists what cannot be told here, as
    the model's config.json is not at hand or the GPU decides.
    """

    release: str
    algorithm: str | None
    worker_class: str | None
    worker_file: str | None
    overlap: bool
    overlap_reason: str
    num_steps: int | None
    topk: int | None
    num_draft_tokens: int | None
    max_running_requests: int | None  # None: SGLang sizes it from memory
    switch_asked: bool  # --speculative-disable-batch-threshold is given
    switch_acts: bool
    switch_reason: str
    start_error: str | None
    reasons: list[str]
    warnings: list[str]
    unknown: list[str]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def rules_for(release: str) -> ModuleType:
    """The rules of a release; ValueError names the supported ones."""
    if release not in RULES:
        raise ValueError(f"SGLang {release} is not supported; specdec knows {' and '.join(RELEASES)}")
    return RULES[release]


def installed_release() -> str:
    """The release of SGLang in this environment; ValueError (one line) when there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        raise ValueError(
            "this environment has no SGLang; env/setup.sh makes one that has, "
            f"and specdec doctor takes --sglang {' or '.join(RELEASES)}"
        ) from None


def predict(flags: Sequence[str], env: Mapping[str, str], release: str, load: int | None = None) -> WorkerPath:
    """The worker path of ``python -m sglang.launch_server FLAGS`` with environment ``env`` under ``release``.

    ``load`` is the number of concurrent requests the server shall serve, for warnings about what caps it.
    Reads a model's config.json when its path is a local folder, else touches nothing.
    Raises ValueError (one line) for flags that SGLang would not parse, an unsupported release and a bad load.
    """
    if load is not None and load < 1:
        raise ValueError(f"the concurrency must be at least 1, not {load}")
    rules = rules_for(release)
    asked = server_flags.parse(flags, release)
    target = architecture(asked.settings.model_path)
    draft = architecture(asked.settings.speculative_draft_model_path)
    resolution = rules.resolve(asked.settings, env, target, draft)
    args = resolution.args

    running = None if resolution.start_error else rules.worker(args)
    ended = resolution.start_error
    refused = f"SGLang ends the start: {ended}" if ended else rules.refusal(args)
    overlap = f"overlap {'off' if args.disable_overlap_schedule else 'on'}"
    reasons = [*resolution.reasons, f"{overlap}: {resolution.overlap_reason}"]
    if running:
        kind = "multi-layer " if args.enable_multi_layer_eagle else ""
        reasons.append(f"{kind}{args.speculative_algorithm} with {overlap}: {running.name}")
    warnings = [*resolution.warnings, *environment.dead_variables(env, release)]
    warnings += load_warnings(args, rules.graph_ceiling(args), load)
    if refused is None and asked.switch is None:
        warnings.append("without --speculative-disable-batch-threshold the switch is not loaded")
    return WorkerPath(
        release=release,
        algorithm=args.speculative_algorithm,
        worker_class=running.name if running else None,
        worker_file=running.file if running else None,
        overlap=not args.disable_overlap_schedule,
        overlap_reason=resolution.overlap_reason,
        num_steps=args.speculative_num_steps,
        topk=args.speculative_eagle_topk,
        num_draft_tokens=args.speculative_num_draft_tokens,
        max_running_requests=args.max_running_requests,
        switch_asked=asked.switch is not None,
        switch_acts=refused is None,
        switch_reason=refused or f"it acts in {running.name if running else None}",
        start_error=resolution.start_error,
        reasons=reasons,
        warnings=warnings,
        unknown=resolution.unknown,
    )


def load_warnings(args: Settings, ceiling: GraphCeiling | None, load: int | None) -> list[str]:
    """What keeps ``load`` concurrent requests from running as one batch, or from running in a CUDA graph."""
    if load is None:
        return []
    warnings = []
    batch = load
    if args.max_running_requests is not None and args.max_running_requests < load:
        batch = args.max_running_requests
        warnings.append(f"of {load} concurrent requests {load - batch} wait: {batch} run at most")
    if ceiling is not None and ceiling.high < batch:
        warnings.append(
            f"decode batches above {ceiling.high} run without a CUDA graph ({ceiling.why}); "
            f"the load makes batches of {batch}"
        )
    elif ceiling is not None and ceiling.low < batch:
        warnings.append(f"decode batches up to {batch} may exceed the CUDA graph's ceiling ({ceiling.why})")
    return warnings


def render(path: WorkerPath) -> str:
    """Text for people."""
    if path.start_error:
        headline = f"SGLang {path.release} does not start: {path.start_error}"
    elif path.worker_class is None:
        headline = f"SGLang {path.release} runs without speculation"
    else:
        overlap = "on" if path.overlap else "off"
        headline = f"SGLang {path.release} runs {path.worker_class} ({path.worker_file}), overlap {overlap}"
    lines = [headline]
    if path.worker_class is not None:
        values = (path.num_steps, path.topk, path.num_draft_tokens, path.max_running_requests)
        steps, topk, tokens, running = ("not known" if value is None else value for value in values)
        lines.append(f"  drafts     {steps} steps, topk {topk}, {tokens} draft tokens; running requests {running}")
    lines.append(f"  switch     {'can act' if path.switch_acts else 'cannot act'}: {path.switch_reason}")
    for title, notes in (
        ("because", path.reasons),
        ("warning", path.warnings),
        ("not known", path.unknown),
    ):
        lines += [f"  {title:<11}{note}" for note in notes]
    return "\n".join(lines)
