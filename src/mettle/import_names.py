"""`import verifiers` wherever Mettle is installed: in a script, a notebook, an environment's own tests.

Parts: `offer`, called by `mettle_names.pth` when an interpreter starts, and `NameFinder`, which answers. Mettle
answers to the names of two libraries that environments are written with, `verifiers` and `prime_sandboxes`. Invariants:
one of these that is really installed, however and in whatever order, is the one that is imported; a folder of that name
without code is none; until one of the names is asked for, nothing is imported but this file, which imports only `sys`.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
"""Instead of the one of `typing`, whose import would cost each start of an interpreter more than all the rest."""
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

HOMES = {"verifiers": "mettle.envs.legacy.aliases", "prime_sandboxes": "mettle.envs.legacy.prime_sandboxes"}
"""The module here that answers for a name, by its function `spec_of`."""


class NameFinder:
    """Finds the names of `HOMES` where nothing else does; what is below one, only once its root was found here.

    It stands first, since Python would take an empty folder `verifiers` of the working directory for a package.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the real one; of ours where there is none."""
        home = HOMES.get(fullname.partition(".")[0])
        if home is None or "." in fullname:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            found: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if found is not None and found.loader is not None and not _is_namespace(found):
                return found
        ours: ModuleSpec | None = _module(home).spec_of(fullname)
        return ours


def _module(name: str) -> ModuleType:
    from importlib import import_module

    return import_module(name)


def _is_namespace(spec: ModuleSpec) -> bool:
    return spec.origin is None and type(spec.loader).__name__.lower().strip("_") == "namespaceloader"


def offer() -> None:
    """Let the names be found in this process, at most once."""
    if not any(isinstance(finder, NameFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, NameFinder())
