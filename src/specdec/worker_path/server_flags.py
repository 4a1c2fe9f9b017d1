"""SGLang's command line, parsed as SGLang parses it (abbreviations included), without importing SGLang."""

import argparse
import dataclasses
import difflib
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

from specdec.policy import SwitchSettings
from specdec.worker_path import options_0_5_12, options_0_5_23
from specdec.worker_path.settings import Settings

OPTIONS = {"0.5.12": options_0_5_12.OPTIONS, "0.5.23": options_0_5_23.OPTIONS}

# The switch's own flags, which the plugin adds to either release's parser.
THRESHOLD_FLAG = "--speculative-disable-batch-threshold"
RESUME_FLAG = "--speculative-resume-batch-threshold"
DWELL_FLAG = "--speculative-disable-dwell-steps"

# How each kind of option in the tables is declared to argparse.
_KINDS: dict[str, dict[str, object]] = {
    "flag": {"action": "store_true"},
    "switch": {"action": argparse.BooleanOptionalAction},
    "value": {},
    "int": {"type": int},
    "optional": {"nargs": "?"},
    "values": {"nargs": "*"},
    "ints": {"nargs": "+", "type": int},
}

# Options whose field in ServerArgs is not argparse's (`ServerArgs.from_cli_args` of 0.5.12).
_FIELDS = {
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "data_parallel_size": "dp_size",
}


@dataclasses.dataclass(frozen=True)
class ServerFlags:
    """What a command line asks of SGLang, and of the switch (None: the switch is not loaded)."""

    settings: Settings
    switch: SwitchSettings | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(flags: Sequence[str], release: str) -> ServerFlags:
    """The settings that ``flags`` (everything after ``sglang.launch_server``) ask of SGLang ``release``.

    Raises ValueError with one line for a flag that this release does not have, an ambiguous abbreviation,
    a missing or ill-typed value, impossible numbers of the switch, and for --config, whose file is not read.
    """
    parser = _parser(release)
    given, rest = parser.parse_known_args(list(flags))
    if rest:
        raise ValueError(_unknown(rest[0], parser, release))
    values = {_FIELDS.get(name, name): value for name, value in vars(given).items()}
    if "config" in values:
        raise ValueError("--config is not read here: put the file's entries on the command line as flags")
    names = {field.name for field in dataclasses.fields(Settings)}
    settings = Settings(**{name: value for name, value in values.items() if name in names})
    return ServerFlags(settings, _switch(values))


def _switch(values: dict[str, Any]) -> SwitchSettings | None:
    threshold = values.get("speculative_disable_batch_threshold")
    resume = values.get("speculative_resume_batch_threshold")
    dwell = values.get("speculative_disable_dwell_steps", 1)
    if threshold is None:
        if resume is not None or "speculative_disable_dwell_steps" in values:
            raise ValueError(f"{RESUME_FLAG} and {DWELL_FLAG} have no effect without {THRESHOLD_FLAG}")
        return None
    if threshold.lower() == "none":
        return SwitchSettings(None, resume, dwell)
    try:
        largest = int(threshold)
    except ValueError:
        raise ValueError(f"{THRESHOLD_FLAG} wants an integer or none, not {threshold!r}") from None
    return SwitchSettings(largest, resume, dwell)


@functools.cache
def _parser(release: str) -> argparse.ArgumentParser:
    # SUPPRESS leaves what was not given out of the namespace, so that Settings' defaults stand.
    parser = _Parser(prog=f"SGLang {release}", add_help=False, argument_default=argparse.SUPPRESS)
    for line in OPTIONS[release].split("\n"):
        if line:
            kind, *words = line.split()
            field = {"dest": words.pop()[1:]} if words[-1].startswith("=") else {}
            parser.add_argument(*words, **_KINDS[kind], **field)  # type: ignore[arg-type]
    parser.add_argument(THRESHOLD_FLAG)
    parser.add_argument(RESUME_FLAG, type=int)
    parser.add_argument(DWELL_FLAG, type=int)
    return parser


def _unknown(word: str, parser: argparse.ArgumentParser, release: str) -> str:
    if not word.startswith("-"):
        return f"{word!r} is not a flag of SGLang {release}: give what follows sglang.launch_server"
    name = word.split("=")[0]
    elsewhere = [other for other, options in OPTIONS.items() if f" {name} " in f"{options} ".replace("\n", " ")]
    if elsewhere:
        return f"{name} is not a flag of SGLang {release}; {elsewhere[0]} has it"
    near = difflib.get_close_matches(name, parser._option_string_actions, n=1)
    return f"{name} is not a flag of SGLang {release}" + (f"; did you mean {near[0]}?" if near else "")
