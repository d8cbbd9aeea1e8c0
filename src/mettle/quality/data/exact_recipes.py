"""The reward of short answers: 1 for the right one, however it is written, and 0 for everything else.

Parts: `EXACT` (what to ask for, by format), `exact_functions` (the code). The code is the source of the readers in
`answer_values`, so that what detects a format, what makes near misses of it and what rewards it read alike. Invariant:
an answer that cannot be read as its format is compared as text, whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mettle.quality.answer_values import as_date, as_items, as_roman, as_time, as_version, as_words, as_written

_NAMED = '''def correct(completion: Any, answer: str, parser: Any) -> float:
    """1 when the answer given is the right one, whole{tolerance}."""
    given = {reader}(parser.parse_answer(completion) or "")
    return float(bool(given) and given == {reader}(answer))
'''
_READ = '''def correct(completion: Any, answer: str, parser: Any) -> float:
    """1 when the {noun} given is the right one, however it is written."""
    given, wanted = parser.parse_answer(completion) or "", {reader}(answer)
    if wanted is None:
        return float(bool(given) and {words}(given) == {words}(answer))
    return float({reader}(given) == wanted)
'''


@dataclass(frozen=True, slots=True)
class ExactRecipe:
    """`what` and `example` are asked for; `reader` reads, None for what is compared as text."""

    what: str
    example: str
    reward: str
    noun: str = ""
    reader: Callable[[str], Any] | None = None
    imports: tuple[str, ...] = ()


_SAME = "1 when the answer is the right one, whatever its case"
EXACT: dict[str, ExactRecipe] = {
    "multiple-choice": ExactRecipe("the letter of the right choice, alone,", "B", _SAME),
    "boolean": ExactRecipe("yes or no, alone,", "yes", _SAME),
    "label": ExactRecipe("the label alone", "label", _SAME),
    "short": ExactRecipe("the answer alone, without a sentence around it,", "Paris", _SAME),
    "date": ExactRecipe(
        "the date alone", "2024-03-05", "1 when it is the same date, however it is written", "date", as_date,
        ("import re", "from datetime import datetime"),
    ),
    "time": ExactRecipe(
        "the time alone", "14:30", "1 when it is the same time of day", "time", as_time, ("import re",)
    ),
    "version": ExactRecipe(
        "the version alone", "1.10.2", "1 when it is the same version", "version", as_version, ("import re",)
    ),
    "roman": ExactRecipe(
        "the Roman numeral alone", "XIV", "1 when it is the same numeral", "numeral", as_roman, ("import re",)
    ),
    "list": ExactRecipe(
        "the items alone, in order, separated by commas,", "first, second, third",
        "1 when all items are right and in order", "list", as_items, ("import re",),
    ),
}  # fmt: skip


def exact_functions(name: str, *, has_case: bool = False) -> tuple[str, tuple[str, ...]]:
    """The code of a format and the imports that it needs. `has_case`: answers differ in nothing but case."""
    recipe, words = EXACT[name], as_written if has_case else as_words
    if recipe.reader is None or (has_case and recipe.reader is as_items):
        tolerance = "" if has_case else ", whatever its case and space"
        return "\n\n".join([inspect.getsource(words), _NAMED.format(reader=words.__name__, tolerance=tolerance)]), ()
    code = _READ.format(noun=recipe.noun, reader=recipe.reader.__name__, words=words.__name__)
    return "\n\n".join([inspect.getsource(recipe.reader), inspect.getsource(words), code]), recipe.imports
