"""SGLang's missing CPU pieces: what both EAGLE workers need on a machine without a GPU, one module per release.

Loaded through SGLang's plugin entry point, and only when the server is started with ``--device cpu``.
"""

import itertools
import sys
from collections.abc import Sequence


def wants_cpu(argv: Sequence[str]) -> bool:
    """True when the command line asks for ``--device cpu``; SGLang's child processes inherit the command line."""
    return "--device=cpu" in argv or ("--device", "cpu") in set(itertools.pairwise(argv))


def register() -> None:
    """Entry point ``sglang.srt.plugins``: install this release's CPU pieces for a server on the CPU.

    A release without any here runs as if specdec were not there; asking it for the switch is refused by its flags.
    """
    if not wants_cpu(sys.argv):
        return
    from importlib.metadata import version

    release = version("sglang")
    if release == "0.5.12":
        from specdec.cpu import sglang_0_5_12

        sglang_0_5_12.install()
    elif release == "0.5.23":
        from specdec.cpu import sglang_0_5_23

        sglang_0_5_23.install()
