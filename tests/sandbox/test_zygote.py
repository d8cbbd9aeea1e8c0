"""The audited core stands alone: what runs beside untrusted code is the standard library and these files."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from tests.sources import syntax_tree

import mettle.sandbox.zygote

ROOM = Path(mettle.sandbox.zygote.__file__).parent


def test_the_zygote_imports_nothing_outside_itself():
    found = {f"{path.name}: {name}" for path in ROOM.glob("*.py") for name in _imported(path) if not _is_inside(name)}
    assert sorted(found) == []


def _imported(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.ImportFrom):
            names.append(f"{'.' * node.level}{node.module or ''}")
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def _is_inside(name: str) -> bool:
    return name.startswith(mettle.sandbox.zygote.__name__) or name.partition(".")[0] in sys.stdlib_module_names
