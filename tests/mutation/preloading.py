"""What a process may load before it forks trials of a module: everything that does not import that module.

A trial spends most of its time on imports. Those of other packages, and of the modules of Mettle that neither are the
module under test nor import it on any way, are the same in every trial, and so are done once.

Invariant: a module that imports the one under test, in a function or for types included, is never loaded here.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

OWN = "mettle"
NOT_AHEAD = ("pytest", "_pytest", "tests", "conftest", "test_", "hypothesis", "_hypothesis", "xdist", "__")
"""What pytest wants to load by itself, so that it can rewrite its asserts."""


def preload(names: Iterable[str], source: Path, module: str) -> None:
    """Import those of `names` that may be loaded ahead; `source` is the folder of Mettle's package."""
    dependent = importers_of(module, source)
    for name in sorted(names):
        is_ours = name.partition(".")[0] == OWN
        if name in sys.modules or name.startswith(NOT_AHEAD) or (is_ours and name in dependent):
            continue
        # What cannot be loaded by its name alone is loaded by the trials, as it would be without this.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def importers_of(module: str, source: Path) -> set[str]:
    """The module and all that import it, directly or not."""
    imports = {_name(path, source): _imports(path, source) for path in source.rglob("*.py")}
    found, new = {module}, {module}
    while new:
        new = {name for name, needed in imports.items() if name not in found and needed & found}
        found |= new
    return found


def _name(path: Path, source: Path) -> str:
    return ".".join((OWN, *path.relative_to(source).with_suffix("").parts)).removesuffix(".__init__")


def _imports(path: Path, source: Path) -> set[str]:
    """What a file names in its imports, with the packages around them; a name in quotes may be a lazy import."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom(module=str() as base):
                found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
            case ast.Import():
                found |= {alias.name for alias in node.names}
            case ast.Constant(value=str() as text) if text.startswith(f"{OWN}."):
                found.add(text.partition(":")[0])
    around = {".".join(name.split(".")[:end]) for name in found for end in range(1, name.count(".") + 2)}
    own = _name(path, source).split(".")
    return around | {".".join(own[:end]) for end in range(1, len(own))}
