"""Printable text cut into cells and lines.

Parts: `cut`, `pad`, `wrap` (offsets of the lines of a text, so that ten megabytes are not copied), `sendable` (for the
clipboard).
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from rich.cells import cell_len, get_character_cell_size

ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


def cut(text: str, width: int) -> str:
    """At most `width` cells of a line, an ellipsis at the end of one that was longer."""
    if text.isascii():
        return text if len(text) <= width else text[: max(0, width - 1)] + ELLIPSIS[: max(0, width)]
    if cell_len(text) <= width:
        return text
    taken, used = [], 0
    for char in text:
        used += get_character_cell_size(char)
        if used > width - 1:
            break
        taken.append(char)
    return "".join(taken) + ELLIPSIS[: max(0, width)]


def pad(text: str, width: int, *, is_right: bool = False) -> str:
    """Exactly `width` cells of a line."""
    text = cut(text, width)
    gap = " " * (width - (len(text) if text.isascii() else cell_len(text)))
    return gap + text if is_right else text + gap


def wrap(text: str, width: int | None) -> list[tuple[int, int]]:
    """Where the lines of a printable text begin and end, none over `width` cells (None: as long as they are)."""
    lines: list[tuple[int, int]] = []
    start, is_ascii = 0, text.isascii()
    while True:
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        if width is None or (is_ascii and end - start <= width):
            lines.append((start, end))
        elif is_ascii:
            _wrap_ascii(text, start, end, width, lines)
        else:
            _wrap_cells(text, start, end, width, lines)
        if end == len(text):
            return lines
        start = end + 1


def sendable(text: str) -> str:
    """`text` as UTF-8 can hold it."""
    return text.encode("utf-8", "replace").decode()


def _wrap_ascii(text: str, start: int, end: int, width: int, lines: list[tuple[int, int]]) -> None:
    while end - start > width:
        space = text.rfind(" ", start + 1, start + width + 1)
        stop = space if space > start else start + width
        lines.append((start, stop))
        start = stop + (stop == space)
    lines.append((start, end))


def _wrap_cells(text: str, start: int, end: int, width: int, lines: list[tuple[int, int]]) -> None:
    """The same where characters take no, one or two cells."""
    line = text[start:end]
    if len(line) * 2 <= width or cell_len(line) <= width:
        lines.append((start, end))
        return
    sums = list(accumulate(map(get_character_cell_size, line), initial=0))
    at = 0
    while sums[-1] - sums[at] > width:
        stop = max(at + 1, bisect_right(sums, sums[at] + width) - 1)
        space = line.rfind(" ", at + 1, stop + 1)
        stop = space if space > at else stop
        lines.append((start + at, start + stop))
        at = stop + (stop == space)
    lines.append((start + at, end))
