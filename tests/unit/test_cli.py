"""What the command line says to words and options that it cannot read. Its commands have tests of their own."""

from __future__ import annotations

import pytest

from specdec import cli

MISREAD = {
    "": "Missing command; see: specdec --help",
    "nosuch": "No such command 'nosuch'; see: specdec --help",
    "sweep": "Missing argument 'out'; see: specdec sweep --help",
    "sweep x --bogus 3": "No such option: --bogus; see: specdec sweep --help",
    "sweep x --repeats two": "Invalid value for '--repeats': ",
    "threshold 4": "Missing option '--url'; see: specdec threshold --help",
    "sweep x --concurrency 0": "concurrencies must be integers of 1 or more, got 0",
}


@pytest.mark.parametrize("words", MISREAD, ids=lambda words: words or "nothing")
def test_what_it_cannot_read_is_one_line_and_exit_code_2(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["specdec", *words.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith(f"specdec: {MISREAD[words]}")


def test_help_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["specdec", "--help"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert "compare" in capsys.readouterr().out
