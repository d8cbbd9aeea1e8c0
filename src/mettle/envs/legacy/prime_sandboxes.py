"""`import prime_sandboxes` inside this process.

Parts: `install_prime_sandboxes_alias`; `spec_of`, by which `mettle.import_names` answers in a process that nobody
prepared. Invariant: an installed `prime_sandboxes` is never shadowed; without one, the name and its historical
submodules lead here, in this process only.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

_ROOT = "prime_sandboxes"
_OURS = "mettle.envs.sandboxes"
_SUBMODULES = ("core", "core.client", "exceptions", "models", "sandbox")


class _PrimeSandboxes(ModuleType):
    """`prime_sandboxes` or a module of it: every name of ours."""

    def __init__(self, name: str, ours: ModuleType) -> None:
        super().__init__(name, ours.__doc__)
        self._ours = ours
        self.__path__: list[str] = []
        self.__all__ = list(ours.__all__)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._ours, name)


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module; those below it are there at once."""
        ours = importlib.import_module(_OURS)
        root = _PrimeSandboxes(_ROOT, ours)
        modules: dict[str, ModuleType] = {_ROOT: root}
        for child in _SUBMODULES:
            name = f"{_ROOT}.{child}"
            modules[name] = sys.modules[name] = _PrimeSandboxes(name, ours)
            parent, _, last = name.rpartition(".")
            setattr(modules[parent], last, modules[name])
        return root

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def spec_of(name: str) -> ModuleSpec:
    """What imports `prime_sandboxes` from here."""
    return ModuleSpec(name, _Loader(), is_package=True)


def install_prime_sandboxes_alias() -> None:
    """Make the name resolve here unless the real one is installed. Doing it twice is harmless."""
    if _ROOT in sys.modules or importlib.util.find_spec(_ROOT) is not None:
        return
    sys.modules[_ROOT] = importlib.util.module_from_spec(spec_of(_ROOT))
