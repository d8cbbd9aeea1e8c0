"""`import verifiers` inside this process.

Parts: `install_verifiers_alias`, the finder that resolves `verifiers` and everything below it, the modules that it
makes; `spec_of`, by which `mettle.import_names` answers in a process that nobody prepared. Environments written for
verifiers import it under its own name and by paths that its releases had; `load_environment` makes those names resolve
here before it imports one, whether a verifiers is installed or not. Invariants: a verifiers that was imported before is
not replaced, because two libraries would then share one name; a name is imported when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from mettle.envs.legacy.paths import advice_for, homes_of, is_package
from mettle.envs.legacy.unavailable import ADVICE_BY_PACKAGE, unavailable, unavailable_name
from mettle.envs.packages.adapters import put_shipped_on_path
from mettle.errors import UserError

ROOT = "verifiers"
API_VERSION = "0.3.0"
"""The last release whose API is offered; what `verifiers.__version__` says."""

_V1_REFUSED = (
    "verifiers.v1 is another library under the same name; this one offers the v0 API of verifiers 0.1.2 to 0.3.0 "
    "(SingleTurnEnv, MultiTurnEnv, ToolEnv, ...)"
)


class _Module(ModuleType):
    """`verifiers.<path>`: its own names, then every name of `mettle.envs`."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name, f"The names of {name}, as this library offers them.")
        self._path = path
        self._homes = homes_of(path) or ()
        if not path:
            self.__version__ = API_VERSION

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return self._names()
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._found(name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return self._names()

    def __reduce__(self) -> tuple[Any, ...]:
        """A module is pickled by its name, as `datasets` does to fingerprint a function that mentions one."""
        return importlib.import_module, (self.__name__,)

    def _names(self) -> list[str]:
        homes = self._homes if self._path else ()
        modules = [module for module in map(_module, homes) if module] or [importlib.import_module("mettle.envs")]
        return sorted({name for module in modules for name in dir(module) if not name.startswith("_")})

    def _found(self, name: str) -> Any:
        child = f"{self._path}.{name}".lstrip(".")
        if homes_of(child) is not None or child in ADVICE_BY_PACKAGE:
            return importlib.import_module(f"{self.__name__}.{name}")
        for home in ("mettle.envs", *self._homes) if is_package(self._path) else (*self._homes, "mettle.envs"):
            module = _module(home)
            if module is not None and hasattr(module, name):
                return getattr(module, name)
        advice = advice_for(self._path)
        known = unavailable(name, advice) if advice else unavailable_name(name)
        if known is not None:
            return known
        raise AttributeError(
            f"{self.__name__} has no {name!r} here; verifiers {API_VERSION} is the API that is offered"
        )


def _module(home: str) -> ModuleType | None:
    if not home.startswith("mettle."):
        put_shipped_on_path()
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name is None or not home.startswith(error.name):
            raise
        return None


class _Finder(MetaPathFinder, Loader):
    """Finds `verifiers` and what is below it. Stands before other finders, so an installed package is not looked at."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for a module that some release had."""
        root, _, below = fullname.partition(".")
        if root != ROOT:
            return None
        below = below.removeprefix("legacy").removeprefix(".") if below.split(".")[0] == "legacy" else below
        if below.split(".")[0] == "v1":
            raise ImportError(_V1_REFUSED, name=fullname)
        if homes_of(below) is None and advice_for(below) is None:
            return None
        spec = ModuleSpec(fullname, self, is_package=is_package(below))
        spec.loader_state = below
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module, whose names come when they are asked for; from the first one on, this finder is asked too."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        return _Module(spec.name, spec.loader_state)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


_FINDER = _Finder()


def spec_of(name: str) -> ModuleSpec | None:
    """What imports `verifiers`, or a module below it, from here; None for a module that no release had."""
    return _FINDER.find_spec(name)


def install_verifiers_alias() -> None:
    """Make `import verifiers` and its submodules resolve to this library in this process. Doing it twice is harmless.

    Raises: UserError when another verifiers was imported before.
    """
    present = sys.modules.get(ROOT)
    if present is not None and not isinstance(present, _Module):
        raise UserError(
            f"another verifiers is imported already, from {getattr(present, '__file__', None)}; "
            "load environments before importing it, or in a process of their own"
        )
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    importlib.import_module(ROOT)
