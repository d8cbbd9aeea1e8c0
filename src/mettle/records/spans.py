"""What stands between two marks in a text: `<answer>`..`</answer>`, `<tool_call>`..`</tool_call>`, `{`..`}`.

Parts: `MarkedSpan`, `spans` (marks that do not nest), `last_balanced` (braces that do). Invariant: a text is walked
through once, so twice the text costs twice the time, whatever a model wrote; a regular expression with
`\\s*(.*?)\\s*` between its marks costs the cube of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_BRACES = re.compile(r"[{}]")


class MarkedSpan(NamedTuple):
    """A pair of marks: the text from `start` to `end`, marks included, and what stands `inside`, stripped."""

    start: int
    end: int
    inside: str


def spans(text: str, opening: str, closing: str) -> Iterator[MarkedSpan]:
    """The pairs of marks in their order. A pair is an opening mark and the first closing one after it."""
    end = 0
    while (start := text.find(opening, end)) >= 0:
        inner = start + len(opening)
        close = text.find(closing, inner)
        if close < 0:
            return
        end = close + len(closing)
        yield MarkedSpan(start, end, text[inner:close].strip())


def last_balanced(text: str, opening: str) -> str | None:
    """What stands between the last `opening`, which ends in a brace, that is closed, and its closing brace."""
    first = text.find(opening)
    if first < 0:
        return None
    braces: list[int] = []
    found: tuple[int, int] | None = None
    for brace in _BRACES.finditer(text, first):
        if brace.group() == "{":
            braces.append(brace.end())
        elif braces:
            inner = braces.pop()
            is_ours = (found is None or inner > found[0]) and text.endswith(opening, 0, inner)
            found = (inner, brace.start()) if is_ours else found
    return None if found is None else text[found[0] : found[1]]
