"""Which speculative worker SGLang runs for given server flags, and whether the switch can act there.

Pure Python: no GPU, no SGLang and no model weights are needed, and nothing is started.
"""

import os
from collections.abc import Mapping
from typing import Any

from specdec.worker_path.live import LiveCheck, check_live, render_live
from specdec.worker_path.path import RELEASES, WorkerPath, installed_release, predict, render, rules_for

__all__ = [
    "RELEASES",
    "LiveCheck",
    "WorkerPath",
    "check_live",
    "installed_release",
    "overlap_reason",
    "predict",
    "refusal",
    "render",
    "render_live",
]


def refusal(server_args: Any, release: str) -> str | None:
    """One line on why the switch cannot act with resolved ``server_args``, or None when it can.

    ``server_args``: SGLang's own ServerArgs, or an object with its attributes. Raises ValueError for an
    unsupported release, and for a 0.5.23 ServerArgs before its ``resolve_once()``.
    """
    rules = rules_for(release)
    reason: str | None = rules.refusal(rules.resolved(server_args))
    return reason


def overlap_reason(server_args: Any, release: str, env: Mapping[str, str] | None = None) -> str:
    """Why overlap is on or off with resolved ``server_args`` (as for `refusal`), as far as they still tell.

    ``env`` is the server's environment, the process's own when not given.
    """
    rules = rules_for(release)
    reason: str = rules.overlap_reason(rules.resolved(server_args), os.environ if env is None else env)
    return reason
