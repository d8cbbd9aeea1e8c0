"""The Python of the README runs as it stands, against a model that is scripted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mettle.clients import factory

ROOT = Path(__file__).resolve().parents[2]


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def test_the_ten_lines_of_the_readme_measure_a_model(scripted, monkeypatch, capsys):
    [block] = blocks()
    assert len([line for line in block.splitlines() if line.strip()]) <= 10

    def square_of_even_numbers(prompt):
        number = int(re.search(r"\d+", prompt[-1]["content"])[0])
        return str(number * number) if number % 2 == 0 else "I don't know"

    asked = []

    def client_for(url):
        asked.append(url)
        return scripted(square_of_even_numbers)

    monkeypatch.setattr(factory, "OpenAIChatCompletionsClient", client_for)
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    assert asked == ["http://127.0.0.1:8000/v1"]
    assert names["results"].stats.reward.mean == pytest.approx(0.5)
    assert "0.5" in capsys.readouterr().out
