"""The program in what a model said: the last fenced block of its language.

Fences are those of CommonMark (three or more backticks or tildes, closed by as many); thinking before `</think>` is
passed over, so that a draft in it is never taken for the answer. A block whose fence was never closed was cut off, and
is none.
"""

from __future__ import annotations

import re

from mettle.envs.parsers.think_parser import MaybeThinkParser

# Possessive, so that a fence is never tried at all its shorter lengths.
_OPENS = re.compile(r" {0,3}(`{3,}+|~{3,}+)([^\n`]*+)\Z")
_CLOSES = re.compile(r" {0,3}(`{3,}+|~{3,}+)[`~]*+[ \t]*+\Z")


class CodeParser(MaybeThinkParser):
    """`parse` gives the last block marked with one of `languages`, else the last without a mark, else ""."""

    def __init__(self, languages: tuple[str, ...] = ("python", "py", "python3")) -> None:
        super().__init__(self._last_block)
        self.languages = languages

    def _last_block(self, text: str) -> str:
        blocks = fenced_blocks(text)
        marked = [code for info, code in blocks if info in self.languages]
        unmarked = [code for info, code in blocks if not info]
        return (marked or unmarked or [""])[-1]

    def format(self, code: str) -> str:
        """`code` as this parser reads it."""
        return f"```{self.languages[0]}\n{code.strip()}\n```"


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(mark, code) of each closed block; the mark is the first word after the opening fence, in small letters.

    A fence that nothing closes opens nothing. Each line is looked at once from either end: `longest` tells at an
    opening fence whether one that is long enough follows, so that many which are never closed cost no search each.
    """
    lines = text.split("\n")
    closing = [_closing_fence(line) for line in lines]
    longest = _longest_after(closing)
    blocks, at = [], 0
    while at < len(lines):
        opened = _OPENS.match(lines[at])
        fence = opened[1] if opened else ""
        if opened and longest[fence[0]][at] >= len(fence):
            end = next(i for i in range(at + 1, len(lines)) if closing[i].startswith(fence))
            code = "".join(f"{line}\n" for line in lines[at + 1 : end])
            blocks.append((opened[2].strip().split(" ")[0].lower(), code))
            at = end
        at += 1
    return blocks


def _closing_fence(line: str) -> str:
    """The fence that a line may close a block with; empty when it is no such line."""
    found = _CLOSES.match(line)
    return found[1] if found else ""


def _longest_after(closing: list[str]) -> dict[str, list[int]]:
    """For either character, the length of the longest closing fence after each line."""
    longest = {mark: [0] * len(closing) for mark in "`~"}
    for at in range(len(closing) - 2, -1, -1):
        for mark, lengths in longest.items():
            fence = closing[at + 1]
            lengths[at] = max(lengths[at + 1], len(fence) if fence.startswith(mark) else 0)
    return longest
