"""What all tests share."""

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def _signals_as_in_a_terminal() -> None:
    """nohup and a shell's background jobs ignore these two, and what a test starts would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
