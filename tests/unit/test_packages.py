"""Arrows between the packages run one way, so that each can be read without those after it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import specdec

ROOT = Path(specdec.__file__).parent
MAY_IMPORT: dict[str, set[str]] = {
    "policy": set(),
    "worker_path": {"policy"},
    "cpu": {"sglang_plugin"},
    "sglang_plugin": {"policy", "worker_path"},
    "analysis": set(),
    "servers": {"worker_path"},
    "load": {"servers"},
    "runs": {"analysis", "load", "servers", "worker_path"},
    "figures": {"analysis", "load", "runs"},
}


def test_every_package_is_listed() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(MAY_IMPORT)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_what_comes_before_them(package: str) -> None:
    imported = set()
    for module in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported |= {name.split(".")[1] for name in names if name.startswith("specdec.")}
    assert imported - {package} <= MAY_IMPORT[package]
