"""Hooking into SGLang: every hook names what it relies on, and a release without that is refused by name."""

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, NoReturn

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def refuse(reason: str) -> NoReturn:
    """End this process with one line and exit code 2. SGLang logs and ignores any Exception of a plugin."""
    import sys

    print(f"specdec: {reason}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def require(target: str, *parameters: str) -> Any:
    """The object at the dotted path, which must accept the named parameters; otherwise the start is refused."""
    try:
        found = pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        refuse(f"this SGLang has no {target} ({error}); install a release that specdec knows: 0.5.12 or 0.5.23")
    missing = [name for name in parameters if name not in inspect.signature(found).parameters]
    if missing:
        refuse(f"{target} of this SGLang takes no {', '.join(missing)}; specdec knows 0.5.12 and 0.5.23")
    return found


def around(target: str, hook: Callable[..., Any], *parameters: str) -> None:
    """Wrap SGLang's function at target: ``hook(original, *args, **kwargs)``."""
    require(target, *parameters)
    HookRegistry.register(target, hook, HookType.AROUND)


def after(target: str, hook: Callable[..., Any], *parameters: str) -> None:
    """Call ``hook(result, *args, **kwargs)`` after SGLang's function; what it returns, if anything, is the result."""
    require(target, *parameters)
    HookRegistry.register(target, hook, HookType.AFTER)
