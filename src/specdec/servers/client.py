"""Talk to a running SGLang server by its address: read its state, change the switch, count its tokens."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

STATE_READ_TIMEOUT_S = 30.0
FLUSH_TIMEOUT_S = 10.0
# No proxy from the environment may stand between us and a server on this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerClient:
    """A server at `url`, whoever started it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def health(self) -> bool:
        """True if GET /health answers 200. SGLang generates a token for it (about 1 s): the scheduler works
        too.
        """
        try:
            self._request("/health")
        except ConnectionError:
            return False
        return True

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 600.0) -> Any:
        """POST `body` as JSON and return the JSON answer, "/generate" for one.

        Raises ConnectionError, one line, for no answer or an HTTP error.
        """
        return json.loads(self._request(path, body, timeout_s))

    def info(self, timeout_s: float = STATE_READ_TIMEOUT_S) -> dict[str, Any]:
        """GET /get_server_info. The scheduler answers it: a hung one is a ConnectionError after `timeout_s`."""
        info = json.loads(self._request("/get_server_info", timeout_s=timeout_s))
        if not isinstance(info, dict):
            raise ConnectionError(f"{self.url}/get_server_info did not answer with an object")
        return info

    def state(self, timeout_s: float = STATE_READ_TIMEOUT_S) -> dict[str, Any] | None:
        """The switch's state on the first data-parallel rank; None on a server without the plugin."""
        states = self.info(timeout_s).get("internal_states") or [{}]
        state: dict[str, Any] | None = states[0].get("specdec")
        return state

    def set_threshold(
        self, threshold: int | None, resume_threshold: int | None = None, dwell_steps: int | None = None
    ) -> None:
        """Change the switch on the running server; None = always speculate. What is not given, the server
        decides.

        Raises ValueError if the server refuses; nothing has changed then.
        """
        wanted: dict[str, int | None] = {"threshold": threshold}
        if resume_threshold is not None:
            wanted["resume_threshold"] = resume_threshold
        if dwell_steps is not None:
            wanted["dwell_steps"] = dwell_steps
        body = {"server_args": {"specdec": wanted}}
        try:
            answer = self.post("/set_internal_state", body, STATE_READ_TIMEOUT_S)
        except ConnectionError as error:
            raise ValueError(f"the server did not take {wanted}: {error}") from error
        state = self.state()
        if state is None:
            raise ValueError("the server runs without specdec's plugin: it has no threshold")
        if not _all_updated(answer):
            raise ValueError(f"the server refused {wanted}: {state.get('refused_change') or state}")
        if any(state.get(key) != value for key, value in wanted.items()):
            raise ValueError(f"the server took {wanted} but reports {state}")

    def flush_cache(self) -> None:
        """Drop cached prefixes. Raises RuntimeError if the server still has requests after 10 s."""
        try:
            self._request(f"/flush_cache?timeout={FLUSH_TIMEOUT_S:g}", {}, timeout_s=FLUSH_TIMEOUT_S + 30.0)
        except ConnectionError as error:
            raise RuntimeError(f"cache not flushed: {error}") from error

    def _request(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = STATE_READ_TIMEOUT_S) -> str:
        """GET, or POST `body` as JSON. Raises ConnectionError (one line) for no answer or an HTTP error."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with _opener.open(request, timeout=timeout_s) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code}: {error.read(300).decode(errors='replace').strip()}"
        except OSError as error:  # refused, reset, timed out
            reason = str(error)
        raise ConnectionError(f"{self.url}{path}: {reason}")


def _all_updated(answer: Any) -> bool:
    """SGLang 0.5.12 and 0.5.23 answer with a list, one bool per data-parallel rank."""
    answers = answer if isinstance(answer, list) else [answer]
    return bool(answers) and all(one.get("updated") if isinstance(one, dict) else one for one in answers)
