"""Environments made on the spot, and packages in a folder that nobody else sees."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mettle.envs as vf

ROWS = [{"question": f"What is {a} times {b}?", "answer": str(a * b)} for a in range(3, 9) for b in range(5, 10)]


@pytest.fixture
def single() -> Callable[..., vf.SingleTurnEnv]:
    """A single-turn environment with these reward functions."""

    def make(*funcs: Any, weights: list[float] | None = None, rows: Any = ROWS, **kwargs: Any) -> vf.SingleTurnEnv:
        rubric = vf.Rubric(funcs=list(funcs), weights=weights, parser=kwargs.get("parser"))
        return vf.SingleTurnEnv(dataset=rows, rubric=rubric, env_id="made-here", **kwargs)

    return make


@pytest.fixture
def here(tmp_path, monkeypatch) -> Iterator[Path]:
    """An empty current folder; modules that are imported from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    modules, path = set(sys.modules), list(sys.path)
    yield tmp_path
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]
    sys.path[:] = path


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
