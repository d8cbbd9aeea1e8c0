"""`import prime_sandboxes` inside this process.

Parts: `install_prime_sandboxes_alias`. Invariant: an installed `prime_sandboxes` is never shadowed; without one, the
name and its historical submodules lead here, in this process only.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

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


def install_prime_sandboxes_alias() -> None:
    """Make the name resolve here unless the real one is installed. Doing it twice is harmless."""
    if "prime_sandboxes" in sys.modules or importlib.util.find_spec("prime_sandboxes") is not None:
        return
    ours = importlib.import_module(_OURS)
    modules = {
        name: _PrimeSandboxes(name, ours)
        for name in ("prime_sandboxes", *(f"prime_sandboxes.{child}" for child in _SUBMODULES))
    }
    for name, module in modules.items():
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
