"""The house plan: who may import whom, and what a file may look like."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from tests.sources import syntax_tree

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(ROOT.glob("src/mettle/**/*.py"))
ROOMS = sorted({path.relative_to(ROOT / "src/mettle").parts[0] for path in SOURCES if path.parent.name != "mettle"})
MAX_LINES = 500
FORBIDDEN_NAMES = {"utils", "common", "helpers", "manager", "misc"}


def test_rooms_import_in_one_direction_only():
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def _contracts() -> dict[str, dict[str, list[str]]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return {contract["name"]: contract for contract in settings["contracts"]}


def _layers() -> list[set[str]]:
    rows = _contracts()["the rooms and who may import whom"]["layers"]
    return [set(re.findall(r"mettle\.(\w+)", row)) for row in rows]


def test_the_plan_in_the_readme_is_the_one_that_is_checked():
    plan = re.search(r"^## What is where\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert plan is not None
    rows = [set(line.split()) for line in re.findall(r"^ (\w+(?:  ?\w+)*?)(?:   |$)", plan[1], re.MULTILINE)]
    assert rows == _layers()


def test_the_map_for_coding_agents_is_the_one_that_is_checked():
    rows = [
        set(re.findall(r"`(?:src/mettle/)?(\w+)(?:/|\.py|`)", line.split("|")[1]))
        for line in re.findall(r"^\| `.*", (ROOT / "AGENTS.md").read_text().partition("## Map")[2], re.MULTILINE)
    ]
    assert [row for row in rows if not row & {"environments", "tests", "docs"}] == _layers()[::-1]


def test_no_room_is_forgotten_where_torch_is_forbidden():
    """The inference server may import its engine, and tests of the orchestrator run without torch at all."""
    kept_out = _contracts()["only the trainer and the engine import torch"]["source_modules"]
    assert {"mettle.trainer", "mettle.inference", *kept_out} >= {f"mettle.{room}" for room in ROOMS}


def test_no_module_has_more_lines_than_one_noun_needs():
    long = {str(path.relative_to(ROOT)): num for path in SOURCES if (num := path.read_text().count("\n")) > MAX_LINES}
    assert not long, "past 500 lines there is a second noun"


def test_no_module_has_a_name_that_says_nothing():
    assert [p for p in SOURCES if FORBIDDEN_NAMES & {p.stem, *p.relative_to(ROOT).parts}] == []


@pytest.mark.parametrize("room", ROOMS)
def test_no_files_of_a_room_need_each_other_to_be_read(room):
    graph = {
        _module(path): _imported(path) for path in SOURCES if path.relative_to(ROOT / "src/mettle").parts[0] == room
    }
    while leaves := [module for module, needed in graph.items() if not needed & graph.keys()]:
        for module in leaves:
            del graph[module]
    assert not graph, f"a circle of imports, in functions and for types included, goes through some of {sorted(graph)}"


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")


@cache
def _imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            known = {name for name in names if (ROOT / "src" / name.replace(".", "/")).with_suffix(".py").exists()}
            found |= known | ({node.module} if known != names else set())
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found - {_module(path)}


def test_every_module_with_code_says_what_it_is_for():
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if syntax_tree(path).body and not ast.get_docstring(syntax_tree(path))
    ]
    assert silent == [], "a module docstring states purpose, parts, invariant"


def test_the_version_stands_in_one_tune():
    from mettle import __version__

    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert declared[1] == __version__


def test_nothing_in_the_project_names_a_package_registry_or_somebodys_home():
    names = re.compile(
        r"py" + r"pi\.org|pythonhosted|download\.pytorch|regis" + r"try\.npmjs|/(?:home|root|Users)/[a-z]"
    )
    found = []
    for pattern in (
        "src/**/*.py",
        "docs/**/*.md",
        "*.md",
        "Makefile",
        "pyproject.toml",
        ".ci/*",
        "environments/*/pyproject.toml",
    ):
        for path in ROOT.glob(pattern):
            if path.is_file() and names.search(path.read_text(encoding="utf-8", errors="replace")):
                found.append(str(path.relative_to(ROOT)))
    assert found == []


def test_only_the_doors_of_the_environment_library_know_older_releases():
    """Classes come through `mettle.envs`, which names the layer; authors' modules are imported in two places."""
    legacy = "mettle.envs.legacy"
    knowing = {
        _module(path) for path in SOURCES if any(name.startswith(legacy) for name in _imported(path))
    }  # fmt: skip
    assert {module for module in knowing if not module.startswith(legacy)} == {
        "mettle.envs.packages.loading",
        "mettle.envs.rubrics.worker",
    }


def test_tests_have_the_path_of_what_they_test_or_are_journeys():
    """`mettle.a.b`, a module or a package, is tested by `tests/a/test_b.py`; what spans several stands in `journeys/`."""
    sources = [path.relative_to(ROOT / "src/mettle").with_suffix("") for path in SOURCES]
    modules = {path.parent if path.name == "__init__" else path for path in sources}
    of_the_tree = {"test_architecture.py", "test_docs.py"}
    misplaced = [
        str(test)
        for test in (path.relative_to(ROOT / "tests") for path in ROOT.glob("tests/**/test_*.py"))
        if test.parent.name != "journeys"
        and str(test) not in of_the_tree
        and test.with_name(test.stem.removeprefix("test_")) not in modules
    ]
    assert misplaced == []


def test_public_class_names_are_unique():
    """One name, one thing. Packages under `environments/` are programs of their own and not counted."""
    homes: dict[str, list[str]] = {}
    for path in [*SOURCES, *sorted(ROOT.glob("adapters/*/mettle_*/**/*.py"))]:
        for node in syntax_tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def uses_of_the_shared_generator(tree):
    """Lines that draw from the generator of the module `random`, which every library of a process shares."""
    own = {"Random", "SystemRandom"}
    return sorted(
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and ast.unparse(node.value) == "random" and node.attr not in own)
        or (isinstance(node, ast.ImportFrom) and node.module == "random" and {n.name for n in node.names} - own)
    )  # fmt: skip


def test_no_module_draws_from_the_generator_that_all_share():
    """A library that seeds it, or a test, would decide what Mettle draws; and Mettle what they draw."""
    example = ast.parse(
        "import random\nrng = random.Random(1)\nrng.random()\nrandom.shuffle(x)\nfrom random import choice"
    )
    assert uses_of_the_shared_generator(example) == [4, 5]
    found = {str(path): uses_of_the_shared_generator(syntax_tree(path)) for path in SOURCES}
    assert {path: lines for path, lines in found.items() if lines} == {}


def host_clock_durations(tree):
    """Lines on which two readings of the host's clock are subtracted, directly or by way of a name of the file."""

    def is_reading(node):
        return isinstance(node, ast.Call) and ast.unparse(node.func) == "time.time"

    named = {
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and is_reading(node.value)
        for target in node.targets
    }

    def is_clock(node):
        return is_reading(node) or ast.unparse(node) in named

    differences = [n for n in ast.walk(tree) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Sub)]
    return [n.lineno for n in differences if is_clock(n.left) and is_clock(n.right)]


def test_no_duration_is_measured_with_a_clock_that_somebody_may_set():
    example = ast.parse("import time\nself.a = time.time()\nb = time.time() - self.a\nc = time.time() - modified")
    assert host_clock_durations(example) == [3]
    found = {str(path): host_clock_durations(syntax_tree(path)) for path in SOURCES}
    assert {path: lines for path, lines in found.items() if lines} == {}
