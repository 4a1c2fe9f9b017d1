"""The live change on SGLang 0.5.23, whose ``/set_internal_state`` carries numbers alone.

``{"specdec": {"threshold": 8}}`` travels to the scheduler as ``{"specdec.threshold": 8}``, and "no threshold"
(null) as infinity, which no integer of a user can be. Everything else is refused by SGLang or by the switch.
"""

import math
from collections.abc import Mapping
from typing import Any

from specdec.sglang_plugin import scheduler
from specdec.sglang_plugin.hooks import around, require

PREFIX = "specdec."
REQUEST = "sglang.srt.managers.io_struct.SetInternalStateReq"


def install() -> None:
    """Hook both ends: the request's reading from HTTP, and the scheduler's answer."""
    # Relies on: the HTTP server builds a request's validation from this schema, after plugins are loaded.
    require(REQUEST)
    around(f"{REQUEST}.__get_pydantic_core_schema__", _schema)
    around(f"{scheduler.SCHEDULER}.set_internal_state", _set_internal_state, "recv_req")


def _schema(original: Any, *args: Any) -> Any:
    """The request's schema, preceded by the flattening."""
    from pydantic_core import core_schema

    return core_schema.no_info_before_validator_function(_flattened_body, original(*args))


def _flattened_body(body: Any) -> Any:
    if not isinstance(body, Mapping) or not isinstance(body.get("server_args"), Mapping):
        return body
    return {**body, "server_args": flatten(body["server_args"])}


def flatten(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for, the object ``specdec`` as numbers. Raises ValueError for what is no number."""
    flat = {key: value for key, value in asked.items() if key != "specdec"}
    if "specdec" not in asked:
        return flat
    change = asked["specdec"]
    if not isinstance(change, Mapping) or not change:
        raise ValueError(f"specdec: expected an object with threshold, resume_threshold or dwell_steps, not {change!r}")
    for name, value in change.items():
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise ValueError(f"specdec: {name} must be an integer or null, not {value!r}")
        flat[PREFIX + name] = math.inf if value is None else value
    return flat


def nest(flat: Mapping[str, float]) -> dict[str, Any]:
    """The reverse of ``flatten``."""
    change = {
        key.removeprefix(PREFIX): None if value == math.inf else value
        for key, value in flat.items()
        if key.startswith(PREFIX)
    }
    others = {key: value for key, value in flat.items() if not key.startswith(PREFIX)}
    return {**others, "specdec": change} if change else others


def _set_internal_state(original: Any, self: Any, recv_req: Any) -> Any:
    """Scheduler.set_internal_state takes the key ``specdec``."""
    asked = nest(recv_req.server_args)
    if "specdec" not in asked:
        return original(self, recv_req)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    return SetInternalStateReqOutput(updated=scheduler.change_settings(self, asked))
