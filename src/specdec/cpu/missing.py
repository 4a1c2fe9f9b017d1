"""Placeholders for packages that SGLang imports at module load but never calls when it serves text on a CPU."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


class Missing:
    """A name of an absent package: may be imported, looked into and compared; raises when called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> "Missing":
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Missing(f"{self._name}.{attribute}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} is not there: specdec's CPU environment has only a stand-in")


def missing(package: str, name: str) -> Missing:
    """The placeholder for a name of a package. Raises AttributeError for dunder names, as a module does."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"{package}.{name}")


class _MissingModule(types.ModuleType):
    def __getattr__(self, name: str) -> Missing:
        return missing(self.__name__, name)


class _MissingSubmodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str) -> None:
        self.prefix = package + "."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self.prefix):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _MissingModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in(package: str) -> None:
    """Let every submodule of the (importable, nearly empty) package be imported, with any name in it."""
    sys.meta_path.append(_MissingSubmodules(package))
