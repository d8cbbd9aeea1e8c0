"""How sure a detected answer format is: how often calls as clear as this one were right.

Parts: `confidence_of`, `bin_of`, `MEASURED`. The counts are those of the even columns of the labelled set
(`tests/quality/data/labelled_answers.jsonl`), each read whole and cut to its first rows; a test counts them again and
holds them to the odd columns, which had no part in them. Invariant: never 0 and never 1, because a count is no proof.
"""

from __future__ import annotations

MARKED = frozenset({"code", "gsm8k", "boxed", "multiple-choice", "boolean", "json"})
TYPED = frozenset({"date", "time", "version", "roman", "numeric"})
CLEAR_SHARE = 0.95
MANY_ROWS = 8

MEASURED: dict[str, tuple[int, int]] = {
    "marked, clear, few rows": (5, 5),
    "marked, clear, many rows": (5, 5),
    "typed, clear, few rows": (13, 13),
    "typed, clear, many rows": (13, 13),
    "typed, mixed, many rows": (1, 1),
    "worded, clear, few rows": (14, 19),
    "worded, clear, many rows": (16, 18),
}
"""(right calls, calls) by bin."""


def bin_of(name: str, share: float, num_rows: int) -> str:
    """How a call is counted: by what the format is recognised by, how many of the answers have it, and of how many."""
    kind = "marked" if name in MARKED else "typed" if name in TYPED else "worded"
    return f"{kind}, {'clear' if share >= CLEAR_SHARE else 'mixed'}, {'many' if num_rows >= MANY_ROWS else 'few'} rows"


def confidence_of(name: str, share: float, num_rows: int) -> float:
    """The share of right calls in the bin, with half a right and half a wrong call added (Jeffreys)."""
    num_right, num_calls = MEASURED.get(bin_of(name, share, num_rows), (0, 0))
    return (num_right + 0.5) / (num_calls + 1)
