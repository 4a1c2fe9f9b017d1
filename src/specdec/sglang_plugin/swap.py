"""Replace attributes of SGLang's objects for one step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def swapped_attributes(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set each (object, attribute, value); put back what was there at the end, also after an exception."""
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in changes]
    for holder, name, value in changes:
        setattr(holder, name, value)
    try:
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)
