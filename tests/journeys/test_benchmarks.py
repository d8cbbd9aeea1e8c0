"""The benchmarks speak of Mettle as it is: a name that moved breaks here, not when somebody measures next."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
FILES = sorted((ROOT / "benchmarks").glob("*.py"))
MISUSED = re.compile(r" \[(attr-defined|call-arg|name-defined)\]$|module named \"mettle")
"""What mypy says of a name that is not there; the finer points of typing are left to whoever writes a benchmark."""


def module_file(name: str) -> Path | None:
    """The source of a module or package of Mettle's; None where there is none."""
    path = SOURCE.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def names_of(name: str) -> set[str]:
    """All that can be imported from a module: what is bound in it outside of functions, or named in it for a later
    import."""
    file = module_file(name)
    assert file is not None, name
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found: set[str] = set()
    is_lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif is_lazy and isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def missing_names(source: str) -> list[str]:
    """What a file imports from Mettle that is not there."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            own = [alias.name for alias in node.names if alias.name.partition(".")[0] == "mettle"]
            found += [name for name in own if module_file(name) is None]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mettle":
            module = node.module or ""
            if module_file(module) is None:
                found.append(module)
                continue
            there = names_of(module)
            found += [
                f"{module}.{alias.name}"
                for alias in node.names
                if alias.name not in there and module_file(f"{module}.{alias.name}") is None
            ]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_all_that_a_benchmark_imports_is_there(path):
    assert missing_names(path.read_text(encoding="utf-8")) == []


def test_a_private_name_that_a_benchmark_uses_is_one_of_ours():
    """A benchmark may look inside; what it looks at has to be there under that name, or be its own."""
    ours = set(re.findall(r"\b_[a-z]\w+", "\n".join(file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py"))))
    unknown = []
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        own |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr) and isinstance(node.ctx, ast.Load)
        }
        unknown += [f"{path.name}: {name}" for name in used - own - ours]
    assert unknown == []


def test_a_name_that_moved_is_found():
    assert missing_names("from mettle.trainer.loop import recipe_of, _recipe") == ["mettle.trainer.loop._recipe"]
    assert missing_names("import mettle.nonsense") == ["mettle.nonsense"]
    assert missing_names("from mettle.trainer.loops import Trainer") == ["mettle.trainer.loops"]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_what_a_benchmark_calls_takes_what_it_gives():
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *map(str, FILES)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "checked" in done.stdout, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if MISUSED.search(line)] == []
