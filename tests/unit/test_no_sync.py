"""Case 13: deciding and reporting cost the device no synchronisation, for no tensor reaches that code.

What it costs on the host: tests/benchmarks/switch_cost.py.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import specdec

PACKAGE = Path(specdec.__file__).parent
MODULES = sorted([*(PACKAGE / "policy").glob("*.py"), *(PACKAGE / "sglang_plugin").glob("*.py")])
READS_A_TENSOR = {"cpu", "item", "numpy", "synchronize", "tolist"}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_no_tensor_is_known_or_read(module: Path) -> None:
    nodes = list(ast.walk(ast.parse(module.read_text())))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name.split(".")[0] == "torch"]
    assert not {node.attr for node in nodes if isinstance(node, ast.Attribute)} & READS_A_TENSOR
