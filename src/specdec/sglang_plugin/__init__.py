"""The plugin that SGLang loads: flags, the switch inside the worker that runs, and what is reported.

SGLang calls ``register`` in the launcher and in every scheduler process, before the command line is parsed
(``load_plugins`` in sglang/launch_server.py, cli/serve.py and managers/scheduler.py, 0.5.12 and 0.5.23).
"""

from importlib import import_module
from importlib.metadata import version

from specdec.sglang_plugin import flags

RELEASES = {"0.5.12": "sglang_0_5_12", "0.5.23": "sglang_0_5_23"}


def register() -> None:
    """Entry point ``sglang.srt.plugins``.

    In a release that specdec does not know only the flags are registered, and using one is refused at start; a
    server without the flags runs as if specdec were not there.
    """
    release = version("sglang")
    flags.register(release, supported=tuple(RELEASES))
    if release in RELEASES:
        import_module(f"specdec.sglang_plugin.{RELEASES[release]}").install()
