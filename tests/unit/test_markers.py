"""Which tests run on every SGLang release: those are marked that import it, ask for it, or use the tests' servers."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# Also inside a program that a test runs in a process of its own.
DEPENDS = re.compile(r"^ *(from|import) sglang\b|\bversion\(\"sglang\"\)|\b(baseline|switched): Server\b", re.MULTILINE)
FILES = [path for path in sorted(TESTS.glob("*/test_*.py")) if DEPENDS.search(path.read_text())]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_depends_on_the_release_is_marked(path: Path) -> None:
    assert "pytest.mark.sglang" in path.read_text()
