"""A conversation to read: blocks one below the other, of which only the lines that are seen are drawn.

Parts: `Transcript`. Each block is a head and a body; a body is laid out as offsets into its text, or as the lines of
its Markdown. Invariants: drawing a line costs the same in a conversation of ten lines and of a million; links and
escapes of a model never reach the terminal, Markdown's included; a search shows plain text, so that what is found can
be marked.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from mettle.tui.blocks import Block
from mettle.tui.markdown import MAX_MARKDOWN_CHARS, markdown_lines
from mettle.tui.search import Needle
from mettle.tui.text import pad, wrap
from mettle.wording import one_line, whole

INDENT = 2
KINDS = ("system", "user", "assistant", "tool", "call", "reasoning", "error", "json", "text")
Line = tuple[int, int]


class _Layout:
    """The lines of one block at one width: a head, a body, an empty line."""

    def __init__(self, block: Block, width: int, is_wrapped: bool, is_markdown: bool, is_dark: bool) -> None:
        self.spans: list[Line] = []
        self.drawn: list[list[Segment]] | None = None
        if block.is_open and is_markdown and block.is_markdown and len(block.body) <= MAX_MARKDOWN_CHARS:
            self.drawn = markdown_lines(block.body, width, is_dark=is_dark)
        if block.is_open and self.drawn is None:
            self.spans = wrap(block.body, width if is_wrapped else None)
        body = len(self.spans) if self.drawn is None else len(self.drawn)
        self.num_body = body if block.is_open else 0
        self.has_rest = block.is_open and block.num_left_out > 0
        self.num_lines = 1 + self.num_body + self.has_rest + 1


class Transcript(ScrollView, can_focus=True, inherit_bindings=False):
    """The conversation of one rollout."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        *(f"transcript--{kind}" for kind in KINDS),
        *(f"transcript--{part}" for part in ("body", "muted", "match", "match-here", "current")),
    }
    DEFAULT_CSS = """
    Transcript { height: 1fr; overflow-x: hidden; overflow-y: scroll; scrollbar-size: 1 1; }
    Transcript > .transcript--system { color: $secondary; }
    Transcript > .transcript--user { color: $primary; }
    Transcript > .transcript--assistant { color: $success; }
    Transcript > .transcript--text { color: $success; }
    Transcript > .transcript--tool { color: $accent; }
    Transcript > .transcript--call { color: $warning; }
    Transcript > .transcript--reasoning { color: $muted; text-style: italic; }
    Transcript > .transcript--error { color: $error; }
    Transcript > .transcript--json { color: $accent; }
    Transcript > .transcript--body { color: $foreground; }
    Transcript > .transcript--muted { color: $muted; }
    Transcript > .transcript--match { background: $warning 40%; }
    Transcript > .transcript--match-here { background: $warning; color: $background; text-style: bold; }
    Transcript > .transcript--current { background: $primary 20%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "scroll_lines(1)", "Down", show=False),
        Binding("up,k", "scroll_lines(-1)", "Up", show=False),
        Binding("pagedown,space,ctrl+f,ctrl+d", "page_down", "Page down", show=False),
        Binding("pageup,ctrl+b,ctrl+u", "page_up", "Page up", show=False),
        Binding("home,g", "scroll_home", "Beginning", show=False),
        Binding("end,G", "scroll_end", "End", show=False),
        Binding("J,right_square_bracket", "step(1)", "Next message", show=False),
        Binding("K,left_square_bracket", "step(-1)", "Previous message", show=False),
        Binding("enter", "fold", "Fold or unfold", show=False),
        Binding("z", "fold_all", "Reasoning"),
        Binding("shift+right", "scroll_columns(8)", "Scroll right", show=False),
        Binding("shift+left", "scroll_columns(-8)", "Scroll left", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.blocks: list[Block] = []
        self.is_wrapped = True
        self.is_markdown = True
        self.current = 0
        self.needle: Needle | None = None
        self.matches: list[tuple[int, int, int]] = []
        self.match = 0
        self._layouts: list[_Layout] = []
        self._starts: list[int] = [0]
        self._by_block: list[list[Line]] = []

    def show(self, blocks: Sequence[Block]) -> None:
        """Show another conversation, from its beginning."""
        self.blocks = list(blocks)
        self.current = 0
        self._search()
        self.lay_out()
        self.scroll_to(y=0, x=0, animate=False, immediate=True)

    def lay_out(self) -> None:
        """Work the lines out anew, for the width that there is now."""
        width = self._text_width
        is_markdown = self.is_markdown and not self.matches
        is_dark = self.app.current_theme.dark
        self._layouts = [_Layout(block, width, self.is_wrapped, is_markdown, is_dark) for block in self.blocks]
        self._starts = [0]
        for layout in self._layouts:
            self._starts.append(self._starts[-1] + layout.num_lines)
        widest = width if self.is_wrapped else max((e - s for lay in self._layouts for s, e in lay.spans), default=0)
        self.styles.overflow_x = "hidden" if self.is_wrapped else "auto"
        self.virtual_size = Size(max(width, widest) + INDENT + 1, self._starts[-1])
        self.refresh()

    def set_needle(self, needle: Needle | None) -> None:
        """Mark a text, and see its first place."""
        self.needle = needle
        self._search()
        self.lay_out()
        if self.matches:
            self.see_match(0)

    def see_match(self, number: int) -> None:
        """See a place that was found, unfolding what hides it."""
        self.match = number
        block, start, _ = self.matches[number]
        if not self.blocks[block].is_open:
            self.blocks[block].is_open = True
            self.lay_out()
        self.current = block
        line = bisect_right(self._layouts[block].spans, (start, len(self.blocks[block].body) + 1)) - 1
        self._see(self._starts[block] + 1 + max(0, line))

    def render_line(self, y: int) -> Strip:
        """A line of the screen."""
        width = self.size.width
        line = y + round(self.scroll_offset.y)
        if line >= self._starts[-1]:
            return Strip.blank(width, self.rich_style)
        number = bisect_right(self._starts, line) - 1
        strip = self._block_line(number, line - self._starts[number])
        left = round(self.scroll_offset.x)
        return strip.crop(left, left + width).adjust_cell_length(width, self.rich_style)

    def on_resize(self) -> None:
        """Wrap anew, and stay with the message that was seen."""
        top = bisect_right(self._starts, round(self.scroll_offset.y)) - 1
        offset = round(self.scroll_offset.y) - self._starts[max(0, top)]
        self.lay_out()
        if 0 <= top < len(self._layouts):
            within = min(offset, self._layouts[top].num_lines - 1)
            self.scroll_to(y=self._starts[top] + within, animate=False, immediate=True)

    def on_click(self, event: events.Click) -> None:
        """Choose a message; a click on its head folds it."""
        line = event.y + round(self.scroll_offset.y)
        if line >= self._starts[-1]:
            return
        self.current = bisect_right(self._starts, line) - 1
        if line == self._starts[self.current]:
            self.action_fold()
        self.refresh()

    def action_scroll_lines(self, by: int) -> None:
        """Go up or down by a line."""
        self.scroll_to(y=self.scroll_target_y + by, animate=False, immediate=True)

    def action_scroll_columns(self, by: int) -> None:
        """Go left or right in lines that are not wrapped."""
        self.scroll_to(x=self.scroll_target_x + by, animate=False, immediate=True)

    def action_page_down(self) -> None:
        """Go down by what is seen."""
        self.action_scroll_lines(max(1, self.size.height - 2))

    def action_page_up(self) -> None:
        """Go up by what is seen."""
        self.action_scroll_lines(-max(1, self.size.height - 2))

    def action_scroll_home(self) -> None:
        """Go to the beginning."""
        self.scroll_to(y=0, animate=False, immediate=True)

    def action_scroll_end(self) -> None:
        """Go to the end."""
        self.scroll_to(y=self.max_scroll_y, animate=False, immediate=True)

    def action_step(self, by: int) -> None:
        """Choose the next or the previous block."""
        if self.blocks:
            self.current = max(0, min(self.current + by, len(self.blocks) - 1))
            self.scroll_to(y=self._starts[self.current], animate=False, immediate=True)
            self.refresh()

    def action_fold(self) -> None:
        """Fold the chosen block, or unfold it."""
        if self.blocks:
            block = self.blocks[self.current]
            block.is_open = not block.is_open
            self.lay_out()

    def action_fold_all(self) -> None:
        """Show all reasoning, or hide all of it."""
        thoughts = [block for block in self.blocks if block.kind == "reasoning"]
        is_open = not any(block.is_open for block in thoughts)
        for block in thoughts:
            block.is_open = is_open
        self.lay_out()

    @property
    def _text_width(self) -> int:
        return max(10, self.scrollable_content_region.width - INDENT - 1)

    def _search(self) -> None:
        needle = self.needle
        self._by_block = [needle.spans(block.body) if needle else [] for block in self.blocks]
        self.matches = [(n, start, end) for n, spans in enumerate(self._by_block) for start, end in spans]
        self.match = 0

    def _see(self, line: int) -> None:
        top, height = round(self.scroll_target_y), max(1, self.size.height)
        if not top <= line < top + height - 1:
            self.scroll_to(y=max(0, line - height // 3), animate=False, immediate=True)
        self.refresh()

    def _block_line(self, number: int, line: int) -> Strip:
        block, layout = self.blocks[number], self._layouts[number]
        kind = self._style(block.kind if block.kind in KINDS else "text")
        if line == layout.num_lines - 1:
            return Strip([Segment("", self.rich_style)])
        gutter = Segment("▌ " if number == self.current else "▏ ", Style(color=kind.color, bgcolor=kind.bgcolor))
        if line == 0:
            return Strip([gutter, *self._head(block, kind, number == self.current)])
        if line - 1 >= layout.num_body:
            text = f"{whole(block.num_left_out)} more characters; press + for more, y to copy all"
            return Strip([gutter, Segment(text, self._style("muted"))])
        if layout.drawn is not None:
            base = self._style("body")
            drawn = layout.drawn[line - 1]
            return Strip([gutter, *(Segment(text, base + style if style else base) for text, style, _ in drawn)])
        return Strip([gutter, *self._marked(number, layout.spans[line - 1])])

    def _head(self, block: Block, kind: Style, is_current: bool) -> list[Segment]:
        bold = Style(bold=True, italic=False)
        background = Style(bgcolor=self._style("current" if is_current and self.has_focus else "body").bgcolor)
        title = Segment(one_line(block.title, 120), kind + bold + background)
        if block.is_open:
            rest = max(0, self._text_width - cell_len(title.text))
            return [title, Segment(" " * rest, background)]
        width = max(10, self._text_width - 30)
        preview = pad(one_line(block.body, width), width).rstrip()
        size = f"  {whole(len(block.raw))} characters  "
        return [title, Segment(size, self._style("muted")), Segment(preview, self._style("reasoning"))]

    def _marked(self, number: int, span: Line) -> list[Segment]:
        """The text of a line, with what was found in it marked."""
        block, (start, end) = self.blocks[number], span
        muted = block.kind in ("reasoning", "system")
        base = self._style("reasoning" if muted and block.kind == "reasoning" else "body")
        segments, at = [], start
        spans = self._by_block[number] if number < len(self._by_block) else []
        for found_start, found_end in spans[max(0, bisect_right(spans, (start, start)) - 1) :]:
            if found_start >= end:
                break
            left, right = max(at, found_start), min(end, found_end)
            if right > left:
                is_here = self.matches[self.match] == (number, found_start, found_end)
                mark = self._style("match-here" if is_here else "match")
                segments += [Segment(block.body[at:left], base), Segment(block.body[left:right], base + mark)]
                at = right
        segments.append(Segment(block.body[at:end], base))
        return segments

    def _style(self, name: str) -> Style:
        return self.get_component_rich_style(f"transcript--{name}")
