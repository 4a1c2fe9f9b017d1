"""The CPU pieces at the start of a server: what a CPU cannot do right is refused, before anything is loaded."""

import pytest

from specdec import cpu
from specdec.cpu import sglang_0_5_12, sglang_0_5_23


def test_rejection_sampling_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """SGLang 0.5.23 itself would start, and verify greedily on a CPU whatever the temperature."""
    monkeypatch.setattr("sys.argv", ["launch_server", "--device", "cpu", "--speculative-use-rejection-sampling"])
    with pytest.raises(SystemExit) as ended:
        sglang_0_5_23.install()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("specdec: --speculative-use-rejection-sampling has no CPU stand-in")


def test_a_release_without_cpu_pieces_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["launch_server", "--device", "cpu"])
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.5.99")
    for release in (sglang_0_5_12, sglang_0_5_23):
        monkeypatch.setattr(release, "install", lambda: pytest.fail("installed"))
    cpu.register()
