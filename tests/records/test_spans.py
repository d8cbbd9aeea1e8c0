"""What stands between marks is what a regular expression finds there, in one pass."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from mettle.records.spans import last_balanced, spans

pieces = st.sampled_from(["<a>", "</a>", "<b>", "</b>", " ", "\n", "\u2003", "x", "<", "a>", "<a", "{", "}"])
texts = st.lists(pieces, max_size=14).map("".join)
BOXED = "\\boxed{"
boxes = st.lists(st.sampled_from([BOXED, "{", "}", "a", " ", "\\", "boxed{"]), max_size=14).map("".join)


@given(text=texts)
def test_spans_are_those_of_the_lazy_pattern(text: str) -> None:
    found = re.finditer(r"<a>\s*(.*?)\s*</a>", text, re.DOTALL)
    assert [tuple(span) for span in spans(text, "<a>", "</a>")] == [(m.start(), m.end(), m.group(1)) for m in found]


@given(text=boxes)
def test_the_last_balanced_braces_are_those_that_a_search_from_the_end_finds(text: str) -> None:
    assert last_balanced(text, BOXED) == searched_from_the_end(text)


def searched_from_the_end(text: str) -> str | None:
    """Each mark from the last on, until one is closed: right, and quadratic."""
    start = text.rfind(BOXED)
    while start >= 0:
        depth = 1
        for index in range(start + len(BOXED), len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[start + len(BOXED) : index]
        start = text.rfind(BOXED, 0, start)
    return None
