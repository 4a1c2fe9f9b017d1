"""Profiles: one TOML file per model and machine, and the server commands made from it.

A profile says what to serve, with which flags, on how many GPUs, and which grid a sweep measures by default.
How servers are run is server.py's subject, how they are measured that of specdec.runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specdec.servers.adaptive import AdaptiveTiers, adaptive_flags
from specdec.servers.server import PORT_PLACEHOLDER, ServerPlan
from specdec.worker_path.server_flags import THRESHOLD_FLAG

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]  # the repository; relative paths in a profile start here
PROFILE_FOLDER = ROOT / "env" / "profiles"
ARMS = ("baseline", "static", "dynamic", "off", "adaptive")

PositiveInt = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Worker(_Part):
    """How one worker speculates: the shape of its draft, and what selects this worker."""

    topk: PositiveInt  # branches per draft step; 1 = a chain
    num_steps: PositiveInt  # draft steps before a verify
    num_draft_tokens: PositiveInt  # tokens in one verify, bonus token included
    adaptive: bool = False  # also measure SGLang's own switch on it: a server more per threshold, and one
    flags: tuple[str, ...] = ()
    env: dict[str, str] = {}

    @model_validator(mode="after")
    def _chain_has_one_token_per_step(self) -> Worker:
        if self.topk == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise ValueError("a chain (topk 1) verifies num_steps + 1 draft tokens")
        if self.adaptive and self.topk != 1:
            raise ValueError("adaptive: SGLang's own switch runs chains (topk 1) alone")
        return self


class Release(_Part):
    """What one SGLang release needs beside the common flags, and its workers by name."""

    flags: tuple[str, ...] = ()
    env: dict[str, str] = {}
    workers: dict[str, Worker]


class Grid(_Part):
    """What a sweep measures unless told otherwise."""

    concurrencies: tuple[PositiveInt, ...]  # requests the client keeps in flight
    thresholds: tuple[Annotated[int, Field(ge=0)], ...]  # largest batch size that still speculates
    repeats: PositiveInt  # blocks; each measures every arm once
    output_tokens: PositiveInt  # per request, exact (ignore_eos)
    requests_per_concurrency: PositiveInt  # requests of a cell = this times its concurrency ...
    min_requests: PositiveInt  # ... but at least this many

    def num_prompts(self, concurrency: int) -> int:
        """Requests in a cell of this concurrency."""
        return max(self.min_requests, self.requests_per_concurrency * concurrency)


class Profile(_Part):
    """One model on one machine. `model`, `draft_model`, `prompts` that start with "./" or "/" are paths."""

    name: str
    description: str
    device: Literal["cpu", "cuda"]
    gpus: Annotated[int, Field(ge=0)]  # that one server takes
    side_by_side: bool  # the machine holds the servers of all arms at once
    start_timeout_s: Annotated[float, Field(gt=0)]  # until a server must be ready
    model: str
    draft_model: str
    speculative_algorithm: Literal["EAGLE", "EAGLE3"]
    prompts: str  # JSON lines with "ids" and "text", or a data set in ShareGPT's format
    flags: tuple[str, ...]
    env: dict[str, str] = {}
    releases: dict[str, Release]
    grid: Grid

    @model_validator(mode="after")
    def _can_be_measured(self) -> Profile:
        if "--enable-metrics" not in self.flags:
            raise ValueError("flags: --enable-metrics is missing; tokens are counted from the server's /metrics")
        if one := {"--dp-size", "--data-parallel-size"} & set(self.flags):
            raise ValueError(f"flags: {one.pop()}: measure one replica; the switch's state is that of the first alone")
        return self

    def release(self, sglang: str) -> Release:
        """The part for one release. Raises ValueError if the profile has none."""
        if sglang not in self.releases:
            raise ValueError(f"profile {self.name} is for SGLang {_names(self.releases)}, not {sglang!r}")
        return self.releases[sglang]

    def worker(self, worker: str, sglang: str) -> Worker:
        """A worker by name. Raises ValueError that lists the known ones."""
        workers = self.release(sglang).workers
        if worker not in workers:
            raise ValueError(
                f"no worker {worker!r} in profile {self.name} for SGLang {sglang}; it has {_names(workers)}"
            )
        return workers[worker]


def locate(place: str) -> str:
    """A model or file name for use from any folder: paths made absolute, names on a model hub as they are."""
    return str((ROOT / place).resolve()) if place.startswith(("./", "/")) else place


def context_length(flags: Sequence[str]) -> int | None:
    """The --context-length (tokens) among a server's flags; None if it is left to the model."""
    return int(flags[flags.index("--context-length") + 1]) if "--context-length" in flags else None


def known_profiles() -> list[str]:
    """Names of the profiles that come with the repository."""
    return sorted(path.stem for path in PROFILE_FOLDER.glob("*.toml"))


def load_profile(name_or_path: str | Path) -> Profile:
    """A profile by name (env/profiles/NAME.toml) or by path (ends in .toml).

    Raises ValueError, one line, for an unknown name, a file that is no TOML, or content that is no profile.
    """
    is_path = str(name_or_path).endswith(".toml")
    path = Path(name_or_path) if is_path else PROFILE_FOLDER / f"{name_or_path}.toml"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = _names(known_profiles())
        if not PROFILE_FOLDER.is_dir():
            known = "none outside a checkout of specdec (in one: pip install -e '.[measure]')"
        raise ValueError(f"no profile {str(name_or_path)!r}; known: {known}, or give a .toml file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"profile {path}: {error}") from None
    try:
        # Not strict: TOML has arrays where the model has tuples.
        profile = Profile.model_validate(content, strict=False)
    except ValidationError as error:
        raise ValueError(f"profile {path}: {_first_line(error)}") from None
    if profile.name != path.stem:
        raise ValueError(f"profile {path}: its name is {profile.name!r}, which must be that of the file")
    for place in (profile.model, profile.draft_model, profile.prompts):
        if place.startswith(("./", "/")) and not Path(locate(place)).exists():
            raise ValueError(f"profile {profile.name}: {locate(place)} does not exist")
    return profile


def plan_server(
    profile: Profile, arm: str, worker: str, sglang: str = "0.5.12", tiers: AdaptiveTiers | None = None
) -> ServerPlan:
    """The server that measures `arm` on `worker`.

    Static, dynamic and off share one command per worker: the switch is loaded without a threshold ("none" =
    always speculate) and a sweep sets the threshold live. The baseline (worker "none") has no speculative
    flag. Adaptive takes its `tiers`, or SGLang's default ones. Raises ValueError for an arm, worker or
    release that does not exist.
    """
    if arm not in ARMS:
        raise ValueError(f"no arm {arm!r}; known: {_names(ARMS)}")
    if (arm == "baseline") != (worker == "none"):
        raise ValueError(f"arm {arm!r} with worker {worker!r}: the baseline, and only it, has worker 'none'")
    release = profile.release(sglang)
    flags = [*profile.flags, *release.flags]
    env = {**profile.env, **release.env}
    if worker != "none":
        chosen = profile.worker(worker, sglang)
        flags += [
            *_speculative_flags(profile, chosen),
            *_switch_flags(arm, worker, chosen, sglang, tiers),
            *chosen.flags,
        ]
        env |= chosen.env
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", profile.model]
    command += ["--host", "127.0.0.1", "--port", PORT_PLACEHOLDER, *flags]
    threshold = None if tiers is None else tiers.threshold
    return ServerPlan(arm=arm, worker=worker, command=command, env=env, cwd=str(ROOT), tier_threshold=threshold)


def _speculative_flags(profile: Profile, worker: Worker) -> list[str]:
    return [
        *("--speculative-algorithm", profile.speculative_algorithm),
        *("--speculative-draft-model-path", profile.draft_model),
        *("--speculative-num-steps", str(worker.num_steps)),
        *("--speculative-eagle-topk", str(worker.topk)),
        *("--speculative-num-draft-tokens", str(worker.num_draft_tokens)),
    ]


def _switch_flags(arm: str, worker_name: str, worker: Worker, sglang: str, tiers: AdaptiveTiers | None) -> list[str]:
    if arm != "adaptive":
        return [THRESHOLD_FLAG, "none"]
    if sglang == "0.5.12" or worker.topk != 1:
        raise ValueError(
            f"arm 'adaptive' is SGLang 0.5.23's own switch for topk 1, not for {sglang} {worker_name} "
            f"with topk {worker.topk}"
        )
    return adaptive_flags(worker.num_steps, tiers)


def _names(names: Mapping[str, Any] | list[str] | tuple[str, ...]) -> str:
    return ", ".join(names) or "none"


def _first_line(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "content"
    return f"{where}: {first['msg']}"
