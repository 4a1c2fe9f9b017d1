"""The switch's flags on SGLang's own command line.

The settings ride on the ServerArgs object as attribute ``specdec``, which SGLang pickles to its scheduler processes.
When SGLang's own settings are final differs: each release's module hooks that moment and calls ``check_can_act``.
"""

import argparse
from typing import Any

from specdec.policy import SwitchSettings
from specdec.sglang_plugin.hooks import after, around, refuse
from specdec.worker_path.server_flags import DWELL_FLAG, RESUME_FLAG, THRESHOLD_FLAG

ATTRIBUTE = "specdec"


def register(release: str, supported: tuple[str, ...]) -> None:
    """Add the flags, and put what they say on the ServerArgs object."""
    # Relies on: ServerArgs.add_cli_args(parser) adding the arguments, from_cli_args(args) building the ServerArgs.
    after("sglang.srt.server_args.ServerArgs.add_cli_args", _add_flags, "parser")

    def from_cli_args(original: Any, cls: Any, args: argparse.Namespace) -> Any:
        settings = _settings(args)
        server_args = original(cls, args)
        if settings is not None:
            if release not in supported:
                refuse(f"{THRESHOLD_FLAG} needs SGLang {' or '.join(supported)}; this is {release}")
            setattr(server_args, ATTRIBUTE, settings)
        return server_args

    around("sglang.srt.server_args.ServerArgs.from_cli_args", from_cli_args, "args")


def _add_flags(result: None, parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("specdec: dynamic speculation disable")
    group.add_argument(
        THRESHOLD_FLAG,
        type=_integer_or_none,
        default=argparse.SUPPRESS,
        metavar="N",
        help="Largest batch size that still speculates; above it decode steps are plain. 0: never speculate. "
        "none: load the switch, speculate always until a threshold is set on the running server.",
    )
    group.add_argument(
        RESUME_FLAG,
        type=_integer,
        default=argparse.SUPPRESS,
        metavar="M",
        help="Speculation comes back at this batch size or below (default: N).",
    )
    group.add_argument(
        DWELL_FLAG,
        type=_integer,
        default=argparse.SUPPRESS,
        metavar="K",
        help="Decode steps that a mode is kept at least (default: 1).",
    )


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def _integer_or_none(text: str) -> int | None:
    return None if text.lower() == "none" else _integer(text)


def _settings(args: argparse.Namespace) -> SwitchSettings | None:
    """The settings asked for; None when the switch was not asked for at all."""
    # Suppressed defaults: a flag that was not given is absent, "none" is None.
    resume = getattr(args, "speculative_resume_batch_threshold", None)
    dwell = getattr(args, "speculative_disable_dwell_steps", None)
    if not hasattr(args, "speculative_disable_batch_threshold"):
        if resume is not None or dwell is not None:
            given = RESUME_FLAG if resume is not None else DWELL_FLAG
            refuse(f"{given} has no effect without {THRESHOLD_FLAG}; give that too, or neither")
        return None
    try:
        return SwitchSettings(args.speculative_disable_batch_threshold, resume, 1 if dwell is None else dwell)
    except ValueError as error:
        refuse(str(error))


def check_can_act(server_args: Any, release: str) -> None:
    """Refuse the start, with the reason, if the switch was asked for and cannot act with these resolved settings."""
    if not hasattr(server_args, ATTRIBUTE):
        return
    from specdec.worker_path import refusal

    reason = refusal(server_args, release)
    if reason is not None:
        refuse(f"{THRESHOLD_FLAG} cannot take effect: {reason}")
