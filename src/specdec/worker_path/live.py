"""A running server held against the rules: what its own arguments predict, and what it says that it runs."""

import dataclasses
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from specdec.worker_path.path import RELEASES, RULES
from specdec.worker_path.settings import Settings, Worker

_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class LiveCheck:
    """A server's worker path as its resolved arguments predict it and as its plugin reports it.

    ``plugin`` is "absent", "inactive" (loaded, the switch not asked for) or "active". ``states`` are the
    "specdec" reports, one per data-parallel rank, empty when the plugin is absent. ``differences`` are lines
    that say where prediction and report differ; they are empty when there is nothing to compare.
    """

    url: str
    release: str
    predicted_class: str | None
    predicted_file: str | None
    predicted_overlap: bool
    overlap_reason: str
    plugin: str
    states: list[dict[str, Any]]
    differences: list[str]
    switch_acts: bool
    switch_reason: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def check_live(url: str) -> LiveCheck:
    """Asks the server at ``url`` (such as http://127.0.0.1:30000) for /server_info and compares.

    Raises ValueError (one line) when nothing answers there, the answer is not SGLang's, or its release is not
    a supported one.
    """
    info = _server_info(url)
    release = str(info.get("version"))
    if release not in RULES:
        raise ValueError(f"{url} runs SGLang {release}; specdec knows {' and '.join(RELEASES)}")
    rules = RULES[release]
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    args = SimpleNamespace(**{name: info.get(name, default) for name, default in defaults.items()})
    worker = rules.worker(args)
    overlap = not args.disable_overlap_schedule
    states = [state["specdec"] for state in info["internal_states"] if "specdec" in state]
    differences = [line for rank, state in enumerate(states) for line in _differences(rank, state, worker, overlap)]
    plugin, refused = _plugin(states, rules.refusal(args))
    if refused is None and differences:
        refused = "what runs is not what the server's arguments say"
    return LiveCheck(
        url=url,
        release=release,
        predicted_class=worker.name if worker else None,
        predicted_file=worker.file if worker else None,
        predicted_overlap=overlap,
        overlap_reason=rules.overlap_reason(args, {}),
        plugin=plugin,
        states=states,
        differences=differences,
        switch_acts=refused is None,
        switch_reason=refused or f"it acts in {worker.name if worker else None}",
    )


def _plugin(states: list[dict[str, Any]], refusal: str | None) -> tuple[str, str | None]:
    """Whether the plugin is there and active, and why the switch does not act (None when it does)."""
    if not states:
        return "absent", "the server runs without the specdec plugin: it is not installed in its environment"
    inactive = [state for state in states if not state["active"]]
    if inactive:
        return "inactive", refusal or str(inactive[0]["inactive_reason"])
    return "active", refusal


def _differences(rank: int, state: dict[str, Any], worker: Worker | None, overlap: bool) -> list[str]:
    """One line per fact that the plugin reports otherwise than the rules predict it."""
    predicted = {
        "worker_class": worker.name if worker else None,
        "worker_file": worker.file if worker else None,
        "overlap": overlap,
    }
    return [
        f"rank {rank}: {name} is {state[name]}, predicted {value}"
        for name, value in predicted.items()
        if state[name] != value
    ]


def _server_info(url: str) -> dict[str, Any]:
    address = url.rstrip("/") + "/server_info"
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not a server's URL; it would look like http://127.0.0.1:30000")
    try:
        # Without proxies: the server is a machine of one's own, often this one.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(address, timeout=_TIMEOUT_S) as answer:
            info = json.load(answer)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{address} answers {error.code}: not an SGLang server, or one that wants a key") from error
    except OSError as error:
        raise ValueError(f"no server answers at {url}: {getattr(error, 'reason', error)}") from error
    except ValueError as error:
        raise ValueError(f"{address} does not answer with JSON: not an SGLang server") from error
    if not isinstance(info, dict) or not isinstance(info.get("internal_states"), list):
        raise ValueError(f"{address} is not SGLang's: it has no internal_states")
    return info


def render_live(check: LiveCheck) -> str:
    """Text for people."""
    lines = [
        f"{check.url} runs SGLang {check.release}; plugin: {check.plugin}",
        f"  predicted  {_worker_line(check.predicted_class, check.predicted_file, check.predicted_overlap)}",
    ]
    for rank, state in enumerate(check.states):
        name = "actual" if len(check.states) == 1 else f"rank {rank}"
        lines.append(f"  {name:<9}  {_worker_line(state['worker_class'], state['worker_file'], state['overlap'])}")
        lines.append(
            f"             specdec {state['plugin_version']}, threshold {state['threshold']}, resume "
            f"{state['resume_threshold']}, dwell {state['dwell_steps']}, now {state['mode']}"
        )
        lines.append(
            f"             {state['speculative_steps']} speculative and {state['plain_steps']} plain steps, "
            f"{state['switches_off']} switches off and {state['switches_on']} on, "
            f"accept length {state['accept_length']}"
        )
    lines += [f"  differs    {difference}" for difference in check.differences]
    lines.append(f"  switch     {'acts' if check.switch_acts else 'does not act'}: {check.switch_reason}")
    return "\n".join(lines)


def _worker_line(name: str | None, file: str | None, overlap: bool) -> str:
    worker = f"{name} ({file})" if name else "no speculative worker"
    return f"{worker}, overlap {'on' if overlap else 'off'}"
