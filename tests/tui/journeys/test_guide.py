"""The how-to page says what the browser does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mettle.tui.filters import FIGURES, NAMES, WORDS, parse_filter

GUIDE = (Path(__file__).parents[3] / "docs" / "how-to" / "browse-evaluations.md").read_text()
NAMES_OF_KEYS = {"?": "question_mark", "/": "slash", "[": "left_square_bracket", "]": "right_square_bracket"}


def test_every_filter_in_the_guide_is_understood():
    block = re.search(r"turns one round:\n\n((?:    .+\n)+)", GUIDE)
    assert block is not None
    sources = [line.strip() for line in block[1].splitlines()]
    assert len(sources) == 4
    for source in sources:
        parsed = parse_filter(source, ["format_reward"])
        assert parsed.predicates or parsed.texts


def test_the_guide_names_every_word_and_every_figure():
    assert [name for name in (*WORDS, *FIGURES, *NAMES) if not re.search(rf"`{name}[`:<]", GUIDE)] == []


@pytest.mark.nightly
async def test_every_key_in_the_guide_is_a_key(browse, run_path):
    told = set(re.findall(r"`([A-Za-z?/\[\]]|ctrl\+t)`", GUIDE))
    bound: set[str] = set()
    async with browse() as at:
        for keys in ("enter", "enter", "enter", "enter", "t"):
            bound |= set(at.app.screen.active_bindings)
            await at.press(keys)
        bound |= set(at.app.screen.active_bindings)
    assert len(told) > 20
    assert {key for key in told if NAMES_OF_KEYS.get(key, key) not in bound} == set()
