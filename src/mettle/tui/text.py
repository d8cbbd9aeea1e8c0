"""What a model or an environment said, made safe to draw and cut into lines.

Parts: `printable` (no character left that drives a terminal or hides), `one_line`, `cut`, `wrap` (offsets of the lines
of a text, so that ten megabytes are not copied), `sendable` (for the clipboard).
Invariant: what `printable` returns holds no control, no half of a surrogate pair, no mark that changes the direction
of writing, and nothing that takes up no cell apart from a few accents on a letter.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import accumulate

from rich.cells import cell_len, get_character_cell_size

ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
TAB = "    "
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_ACCENTS = 4

_PICTURES = {code: chr(0x2400 + code) for code in range(32)} | {127: "\N{SYMBOL FOR DELETE}"}
_SPACES = {0x2028: "\n", 0x2029: "\n", 0xA0: " ", 0x202F: " ", 0x3164: " ", 0xAD: None}
_INVISIBLE = (
    *range(0x80, 0xA0), 0x61C, 0x115F, 0x1160, 0x180E, *range(0x200B, 0x2010), *range(0x202A, 0x202F),
    *range(0x2060, 0x2070), 0xFEFF, 0xFFA0, *range(0xFFF0, 0xFFFC), *range(0xE0000, 0xE0080),
)  # fmt: skip
_DROPPED = (0x200D, *range(0xFE00, 0xFE10), *range(0x1F3FB, 0x1F400), *range(0xE0100, 0xE01F0))
_TABLE: dict[int, str | None] = {
    **_PICTURES,
    **dict.fromkeys(_INVISIBLE, REPLACEMENT),
    **_SPACES,
    # Joiners and variants only choose between pictures, and terminals disagree about the width of the result.
    **dict.fromkeys(_DROPPED),
    9: TAB,
    10: "\n",
}
_SURROGATES = re.compile(r"[\ud800-\udfff]")
_ACCENT = r"[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]"
_ACCENTS = re.compile(f"({_ACCENT}{{{MAX_ACCENTS}}}){_ACCENT}+")
_PLAIN = re.compile(r"[ -~\n]*\Z")


def printable(text: str) -> str:
    """`text` as it can be drawn; newlines stay, a control shows as its picture."""
    if _PLAIN.match(text):
        return text
    text = text.replace("\r\n", "\n")
    if not text.isascii():
        text = _ACCENTS.sub(r"\1", _SURROGATES.sub(REPLACEMENT, text))
    return text.translate(_TABLE)


def one_line(value: object, limit: int = 500) -> str:
    """A short text on one line."""
    text = value if isinstance(value, str) else str(value)
    return " ".join(printable(text[: 4 * limit]).split())[:limit]


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
