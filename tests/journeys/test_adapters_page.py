"""The page about adapters: its examples run, and its arguments are the classes'."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest

import mettle.envs as vf

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "adapters.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("name", SECTIONS)
def test_the_example_constructs_without_importing_or_starting_anything(name, monkeypatch):
    for module in ("gymnasium", "reasoning_gym", "textarena", "mcp"):
        monkeypatch.setitem(sys.modules, module, None)
    [code] = re.findall(r"```python\n(.*?)```", SECTIONS[name], re.DOTALL)
    scope: dict = {}
    exec(code.replace('"python"', repr(sys.executable)), scope)
    assert type(scope["env"]).__name__ == name


@pytest.mark.parametrize("name", SECTIONS)
def test_the_arguments_are_those_of_the_class(name):
    rows = re.findall(r"^\| (`[^|]+`) \|", SECTIONS[name], re.MULTILINE)
    named = {argument for row in rows for argument in re.findall(r"`(\w+)`", row)}
    parameters = {
        p
        for kind in getattr(vf, name).__mro__
        if kind is not object
        for p in inspect.signature(kind.__init__).parameters
    }
    assert named <= parameters, named - parameters
