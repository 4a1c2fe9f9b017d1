"""What a CPU cannot do right is refused at the start of a server, before it has loaded anything."""

import pytest

from specdec.cpu import sglang_0_5_23


def test_rejection_sampling_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """SGLang 0.5.23 itself would start, and verify greedily on a CPU whatever the temperature."""
    monkeypatch.setattr("sys.argv", ["launch_server", "--device", "cpu", "--speculative-use-rejection-sampling"])
    with pytest.raises(SystemExit) as ended:
        sglang_0_5_23.install()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("specdec: --speculative-use-rejection-sampling has no CPU stand-in")
