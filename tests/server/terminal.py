"""A command in a terminal of its own, run and interrupted as a person does it."""

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import termios
import threading
from types import TracebackType


class Terminal:
    """Runs `command` in the foreground of a new pseudo-terminal; ends it with the with-block at the latest."""

    def __init__(self, command: list[str]) -> None:
        self._screen, inside = pty.openpty()
        termios.tcsetwinsize(inside, (50, 200))  # rows, columns; without columns no progress bar is drawn
        self.process = subprocess.Popen(
            command, stdin=inside, stdout=inside, stderr=inside, start_new_session=True, preexec_fn=_take_terminal
        )
        os.close(inside)
        self._shown = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        os.close(self._screen)

    def press_ctrl_c(self) -> None:
        """The terminal makes SIGINT to its foreground process group of this."""
        os.write(self._screen, b"\x03")

    def shown(self) -> str:
        """All that has been written so far."""
        return self._shown.decode(errors="replace")

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: nobody holds the other side any more
            while part := os.read(self._screen, 4096):
                self._shown += part


def _take_terminal() -> None:
    """In the forked child, leader of its new session: the terminal is its own, Ctrl-C is not ignored."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
