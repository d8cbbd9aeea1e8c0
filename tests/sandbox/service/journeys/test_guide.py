"""The guide to the service: its program runs, its settings are accepted, its metrics are there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mettle.sandbox.service.config import ServiceConfig
from mettle.sandbox.service.tokens import TOKEN_ENV
from serving import make_token, serving

GUIDE = (Path(__file__).parents[4] / "docs" / "how-to" / "serve-sandboxes.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.usefixtures("_needs_isolation")
async def test_the_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, make_token(tmp_path))
    [code] = blocks("python")
    names: dict[str, Any] = {}
    exec(code, names)
    async with serving(tmp_path) as (_, first), serving(tmp_path) as (_, second):
        assert await names["main"](first, second) == "passed ns Linux\n"


def test_the_settings_are_accepted() -> None:
    [text] = blocks("toml")
    assert ServiceConfig.model_validate(tomllib.loads(text)).sandbox.python_packages == ("numpy",)
