"""The program in what a model said: the last fenced block of its language.

Fences are those of CommonMark (three or more backticks or tildes, closed by as many); thinking before `</think>` is
passed over, so that a draft in it is never taken for the answer. A block whose fence was never closed was cut off, and
is none.
"""

from __future__ import annotations

import re

from mettle.envs.parsers.think_parser import MaybeThinkParser

_FENCED = re.compile(
    r"^ {0,3}(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^\n`]*)\n(?P<code>.*?)^ {0,3}(?P=fence)[`~]*[ \t]*$",
    re.DOTALL | re.MULTILINE,
)


class CodeParser(MaybeThinkParser):
    """`parse` gives the last block marked with one of `languages`, else the last without a mark, else ""."""

    def __init__(self, languages: tuple[str, ...] = ("python", "py", "python3")) -> None:
        super().__init__(self._last_block)
        self.languages = languages

    def _last_block(self, text: str) -> str:
        blocks = [(found["info"].strip().split(" ")[0].lower(), found["code"]) for found in _FENCED.finditer(text)]
        marked = [code for info, code in blocks if info in self.languages]
        unmarked = [code for info, code in blocks if not info]
        return (marked or unmarked or [""])[-1]

    def format(self, code: str) -> str:
        """`code` as this parser reads it."""
        return f"```{self.languages[0]}\n{code.strip()}\n```"
