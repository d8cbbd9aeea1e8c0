"""Markdown as lines of a terminal, without losing what a model wrote.

Parts: `markdown_lines`. Invariants: tags stay as they were written (`<answer>` is what a parser looks for), so do line
breaks and backslashes; links are shown as text; no character comes out that `text.printable` would not let through.
"""

from __future__ import annotations

import io

from markdown_it import MarkdownIt
from rich.console import Console
from rich.markdown import Markdown
from rich.segment import Segment
from rich.style import Style

from mettle.wording import printable

MAX_MARKDOWN_CHARS = 60_000
"""A longer text is shown plain: Markdown costs a hundred times as much."""

_PARSER = (
    MarkdownIt("commonmark", {"html": False, "maxNesting": 20})
    .enable(["strikethrough", "table"])
    .disable(["escape", "entity", "html_block", "html_inline", "lheading", "reference", "image", "code"])
)


def markdown_lines(text: str, width: int, *, is_dark: bool) -> list[list[Segment]] | None:
    """The lines of `text` as Markdown; None when it cannot be read as that."""
    console = Console(width=width, color_system="truecolor", file=io.StringIO(), force_terminal=True)
    try:
        markdown = Markdown("", hyperlinks=False, code_theme="github-dark" if is_dark else "default")
        markdown.parsed = _PARSER.parse(text)
        for token in markdown.parsed:
            for child in token.children or ():
                child.type = "hardbreak" if child.type == "softbreak" else child.type
        lines = console.render_lines(markdown, console.options.update(width=width, height=None), pad=False)
    except (RecursionError, ValueError, IndexError, KeyError, AssertionError):  # A parser that a text confused.
        return None
    drawn = [[_harmless(segment) for segment in line if not segment.control] for line in lines]
    return _without_gaps(drawn) or None


def _without_gaps(lines: list[list[Segment]]) -> list[list[Segment]]:
    """One empty line where there were several, none at either end."""
    kept: list[list[Segment]] = []
    for line in lines:
        if any(segment.text.strip() for segment in line):
            kept.append(line)
        elif kept and kept[-1]:
            kept.append([])
    return kept[:-1] if kept and not kept[-1] else kept


def _harmless(segment: Segment) -> Segment:
    style = segment.style
    if style is not None and (style.link or style.bgcolor or style.meta):
        # The backgrounds of code and the addresses of links belong to somebody else's theme and to nobody's terminal.
        style = Style(color=style.color, bold=style.bold, italic=style.italic, underline=style.underline)
    return Segment(printable(segment.text).replace("\n", " "), style)
