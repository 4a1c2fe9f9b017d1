"""The verdicts of `specdec self-check`, over stand-ins for its servers: what passes, and what each fault fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specdec.runs import self_check

TOK_S = {"baseline": 100.0, "switched": 98.0, "static": 99.0}
PROMPTS = [f"prompt {i}" for i in range(16)]


class Standing:
    """Stands in for a running server: its answers are its prompts' lengths, unless they come out wrong."""

    def __init__(self, name: str, graphs: bool, wrong: int = 0) -> None:
        self.name, self.graphs, self.wrong = name, graphs, wrong
        self.plan = SimpleNamespace(arm=name)
        self.threshold: int | None = None

    def set_threshold(self, threshold: int | None) -> None:
        self.threshold = threshold

    def state(self) -> dict[str, Any]:
        in_graphs = 10 if self.graphs else 0
        return {
            "active": True,
            "worker_class": "EAGLEWorkerV2",
            "speculative_steps": 10,
            "plain_steps": 10,
            "graph_steps": {"speculative": in_graphs, "plain": in_graphs},
        }

    def post(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        wrong = self.wrong if self.threshold == 0 else 0
        return [{"output_ids": [len(text), i < wrong]} for i, text in enumerate(body["text"])]


def verdicts(
    monkeypatch: pytest.MonkeyPatch, device: str, graphs: bool, wrong: int = 0, **tok_s: float
) -> dict[str, bool]:
    speeds = TOK_S | tok_s
    monkeypatch.setattr(self_check, "run_cell", lambda server, *_: SimpleNamespace(output_tok_s=speeds[server.name]))
    servers: list[Any] = [Standing("baseline", graphs), Standing("switched", graphs, wrong), Standing("static", graphs)]
    found = self_check.check_worker("v2", *servers, PROMPTS, 3, device)
    return {verdict.text: verdict.ok for verdict in found}


def failed(found: dict[str, bool]) -> str:
    return "; ".join(text for text, ok in found.items() if not ok)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_working_switch_passes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(monkeypatch, device, graphs=device == "cuda")
    assert failed(found) == ""
    assert len(found) == 9


def test_wrong_tokens_while_off_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failed(verdicts(monkeypatch, "cpu", graphs=False, wrong=1)) == "v2: off: tokens of 15/16 requests equal"


def test_a_step_without_a_graph_fails_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 6."""
    assert "CUDA graphs ran 0% of speculative steps" in failed(verdicts(monkeypatch, "cuda", graphs=False))


def test_what_off_may_cost_is_the_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 2. As measured on two CPU cores: fine there, and too dear on a GPU."""
    slow = {"baseline": 115.0, "static": 98.0}
    assert failed(verdicts(monkeypatch, "cpu", graphs=False, **slow)) == ""
    assert "off gives 0.852 of the tok/s of baseline" in failed(verdicts(monkeypatch, "cuda", graphs=True, **slow))
