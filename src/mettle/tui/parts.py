"""The parts that screens are put together from.

Parts: `Crumbs` (where one is), `Page` (a text that scrolls and fits itself to its width), `PromptBar` (a line to type
into), `BrowserScreen` (what every screen has: crumbs, a status line, the keys at the bottom, the way back).
Invariant: no text is read as markup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, cast

from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Footer, Input, Static

from mettle.tui.browser import Browser
from mettle.tui.text import ELLIPSIS, cut
from mettle.wording import one_line

WIDE = 110
"""Columns from which on there is room for two panes."""

ARROW = " \N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK} "


class Crumbs(Static):
    """Where one is, and on the right whether it still grows."""

    DEFAULT_CSS = "Crumbs { height: 1; padding: 0 1; background: $panel; text-wrap: nowrap; text-overflow: ellipsis; }"

    def show(self, names: Sequence[str], state: str = "") -> None:
        """Show this path; where there is little room, its beginning goes first."""
        width = max(10, self.app.size.width - 2)
        shown = [one_line(name, 60) for name in names]
        state = cut(one_line(state, 60), max(0, width // 2))
        while len(shown) > 2 and cell_len(ARROW.join(shown)) + 10 + len(state) > width:
            shown = [ELLIPSIS, *shown[2 if shown[0] == ELLIPSIS else 1 :]]
        parts: list[str | tuple[str, str]] = [("mettle", "bold $primary")]
        for number, name in enumerate(shown):
            parts += [(ARROW, "$muted"), (name, "bold" if number == len(shown) - 1 else "")]
        used = sum(cell_len(part if isinstance(part, str) else part[0]) for part in parts)
        if state:
            colour = "$success" if state.startswith("live") else "$warning"
            parts += [" " * max(2, width - used - len(state) - 2), ("\N{BLACK CIRCLE} ", colour), (state, colour)]
        self.update(Content.assemble(*parts))


class Page(VerticalScroll, inherit_bindings=False):
    """A text that is made for the width that it has."""

    DEFAULT_CSS = """
    Page { padding: 0 1; scrollbar-size-vertical: 1; overflow-y: scroll; overflow-x: hidden; }
    Page > Static { width: 1fr; height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "scroll_down", "Down", show=False),
        Binding("up,k", "scroll_up", "Up", show=False),
        Binding("pagedown,space,ctrl+f,ctrl+d", "page_down", "Page down", show=False),
        Binding("pageup,ctrl+b,ctrl+u", "page_up", "Page up", show=False),
        Binding("home,g", "scroll_home", "Beginning", show=False),
        Binding("end,G", "scroll_end", "End", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._make: Callable[[int], Content] = lambda width: Content("")
        self._text = Static(markup=False)

    def compose(self) -> ComposeResult:
        """One text."""
        yield self._text

    def show(self, make: Callable[[int], Content]) -> None:
        """Show what `make` gives for a width."""
        self._make = make
        self._draw()

    def on_resize(self, event: events.Resize) -> None:
        """Make it anew."""
        self._draw()

    def _draw(self) -> None:
        width = self.scrollable_content_region.width
        if width > 0:
            self._text.update(self._make(width))


class PromptBar(Vertical):
    """A line to type into, at the bottom; hidden until something is asked."""

    DEFAULT_CSS = """
    PromptBar { height: auto; display: none; background: $panel; padding: 0 1; }
    PromptBar.-open { display: block; }
    PromptBar Input { height: 1; padding: 0; background: $panel; }
    PromptBar Static { height: auto; color: $muted; }
    PromptBar Static.-wrong { color: $error; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "Cancel")]

    class Answered(Message):
        """Something was typed and sent off."""

        def __init__(self, purpose: str, text: str) -> None:
            super().__init__()
            self.purpose, self.text = purpose, text

    def __init__(self) -> None:
        super().__init__()
        self.purpose = ""
        self._input = Input(compact=True)
        self._hint = Static(markup=False)
        self._asker: Widget | None = None

    def compose(self) -> ComposeResult:
        """The line, and what it is for."""
        yield self._input
        yield self._hint

    def ask(self, purpose: str, hint: str, text: str = "") -> None:
        """Open, with a text to begin with."""
        self.purpose, self._asker = purpose, self.screen.focused
        self._input.value = text
        self._input.cursor_position = len(text)
        self._say(hint)
        self.add_class("-open")
        self._input.focus()

    def refuse(self, why: str) -> None:
        """Stay open, and say what is wrong."""
        self._say(why, is_wrong=True)

    def close(self) -> None:
        """Go away, and give the keys back."""
        self.remove_class("-open")
        if self._asker is not None:
            self._asker.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Pass on what was typed."""
        event.stop()
        self.post_message(self.Answered(self.purpose, event.value))

    def action_cancel(self) -> None:
        """Go away without an answer."""
        self.close()

    def _say(self, text: str, *, is_wrong: bool = False) -> None:
        self._hint.set_class(is_wrong, "-wrong")
        self._hint.update(one_line(text, 400))


class BrowserScreen(Screen[None]):
    """What every screen has. `body` gives the rest."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE, "-wide")]  # noqa: RUF012 - as Textual declares it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace,b", "back", "Back"),
        Binding("question_mark", "app.help", "Help"),
        Binding("tab", "app.focus_next", "Other pane", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.crumbs = Crumbs(markup=False)
        self.status = Static(markup=False, id="status")
        self.prompt = PromptBar()

    @property
    def browser(self) -> Browser:
        """The program."""
        return cast("Browser", self.app)

    @property
    def is_wide(self) -> bool:
        """Whether there is room for two panes."""
        return self.app.size.width >= WIDE

    def compose(self) -> ComposeResult:
        """Crumbs, body, status, prompt, keys."""
        yield self.crumbs
        yield from self.body()
        yield self.status
        yield self.prompt
        yield Footer(show_command_palette=False)

    def body(self) -> Iterable[Widget]:
        """What is between the crumbs and the keys."""
        raise NotImplementedError

    def path(self) -> Sequence[str]:
        """Where this is."""
        return ()

    def state(self) -> str:
        """Whether what is shown still grows."""
        return ""

    def show_path(self) -> None:
        """Draw the crumbs."""
        self.crumbs.show(self.path(), self.state())

    def on_mount(self) -> None:
        """Say where one is."""
        self.show_path()

    def on_resize(self, event: events.Resize) -> None:
        """Fit the crumbs."""
        self.show_path()

    def say(self, text: str) -> None:
        """Put a sentence on the status line."""
        self.status.update(one_line(text, 400))

    def action_back(self) -> None:
        """Leave this screen."""
        self.browser.leave(self)

    def toggle_side(self) -> None:
        """Show or hide the pane on the right; where there is no room for two, change between them."""
        self.toggle_class("-no-side" if self.is_wide else "-side")
