"""The documentation says what the code does: generated pages, links, dependencies, variables, config fields."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(p for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate_docs"] = module
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_what_the_code_says(generate):
    stale = [path.name for path, text in generate.pages().items() if not path.exists() or path.read_text() != text]
    assert not stale, "run `make docs`"


def test_every_config_field_says_what_it_means(generate):
    rooms = generate._rooms()
    described = {config.name for classes in rooms.values() for config in classes if config.meaning}
    silent = [
        f"{room}.{config.name}.{field.name}"
        for room, classes in rooms.items()
        for config in classes
        for field in config.fields
        if not field.meaning and field.name != "type" and field.kind not in described
    ]
    assert not silent, "write a docstring under each field: unit, range, why"


def test_every_option_of_every_command_has_help(generate):
    silent = [
        f"{path} {param.name}"
        for path, command in generate._commands(generate.cli, "mettle")
        for param in command.params
        if param.param_type_name == "option" and not param.help
    ]
    assert not silent


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    pages = [str(p.relative_to(ROOT / "docs")) for p in ROOT.glob("docs/*/**/*.md")]
    assert [p for p in pages if f"({p})" not in index] == []


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    adapters = [tomllib.loads(path.read_text())["project"] for path in ROOT.glob("adapters/*/pyproject.toml")]
    brought = {
        needed for adapter in adapters for needed in adapter["dependencies"] if not needed.startswith("mettle-lab")
    }
    groups = {"Core": project["dependencies"], "adapters": brought, **project["optional-dependencies"]}
    page = (ROOT / "docs" / "explanation" / "dependencies.md").read_text()
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    for group, requirements in groups.items():
        wanted = {re.match(r"[A-Za-z0-9-]+", requirement)[0] for requirement in requirements}
        explained = set(re.findall(r"^- \*\*([^*]+)\*\*: \S", sections.get(group, ""), re.MULTILINE))
        assert explained == wanted, f"[{group}] in docs/explanation/dependencies.md"


def test_every_environment_variable_that_is_read_is_documented():
    text = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("src/mettle/**/*.py"))
    read = set(re.findall(r"environ(?:\.get\(|\.setdefault\(|\[)\s*\"(METTLE_[A-Z_]+)\"", text))
    page = (ROOT / "docs" / "reference" / "process.md").read_text()
    assert {name for name in read if f"`{name}`" not in page} == set()


def test_commands_in_the_docs_exist(generate):
    known = {path.removeprefix("mettle ") for path, _ in generate._commands(generate.cli, "mettle")}
    nouns = {path.split()[0] for path in known}
    unknown = set()
    for page in PAGES:
        for noun, verb in re.findall(
            r"^(?:    |`?)(?:\.venv/bin/)?mettle ([a-z]+)(?: ([a-z]+)\b)?", page.read_text(), re.MULTILINE
        ):
            if noun not in nouns or (noun not in known and f"{noun} {verb}" not in known):
                unknown.add(f"{page.name}: mettle {noun} {verb}")
    assert not unknown
