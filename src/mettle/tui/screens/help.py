"""What the keys do, read off the bindings themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import ModalScreen

from mettle.tui.overview import MUTED, Paragraphs
from mettle.tui.parts import Page
from mettle.tui.text import pad

FILTERS = (
    ("reward<0.5", "also tokens, input, time, turns, a metric"),
    ("error  ok", "failed, or not"),
    ("passed  failed", "by the threshold of the evaluation"),
    ("truncated", "cut off by a limit"),
    ("error:timeout", "its cause, type or message holds this"),
    ("stop:max_turns", "what stopped it holds this"),
    ("task:12", "of this task"),
    ('text:"so the"', "the conversation holds this"),
    ("!error  -ok", "turned round"),
)
KEYS = {
    "question_mark": "?", "slash": "/", "escape": "esc", "backspace": "backspace", "pagedown": "pgdn", "pageup": "pgup",
    "right_square_bracket": "]", "left_square_bracket": "[", "plus": "+", "right": "\u2192", "left": "\u2190",
    "up": "\u2191", "down": "\u2193",
}  # fmt: skip

ROOM = 28
MOVES = frozenset(("Up", "Down", "Page up", "Page down", "First", "Last", "Beginning", "End"))
UNTOLD = frozenset(("Copy selected text", "Focus Previous", "Focus Next", "Quit the app"))
"""Keys of Textual that no screen of ours needs."""


class HelpScreen(ModalScreen[None]):
    """The keys of the screen below."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q,enter", "dismiss", "Close")]

    def __init__(self, bindings: Mapping[str, Any]) -> None:
        super().__init__()
        self._explained = dict(bindings)
        self._page = Page()

    def compose(self) -> ComposeResult:
        """One page."""
        yield self._page

    def on_mount(self) -> None:
        """Write it."""
        self._page.show(self._text)
        self._page.focus()

    def _text(self, width: int) -> Content:
        page = Paragraphs(width)
        page.head("Keys", "the mouse works too: rows, heads of columns, messages")
        for description, keys in self._keys().items():
            page.line((pad("  ".join(keys), ROOM), "bold"), " ", description)
        page.head("Filters", "all that is asked for must hold")
        for example, meaning in FILTERS:
            page.line((pad(example, ROOM), "bold"), " ", (meaning, MUTED))
        return page.content()

    def _keys(self) -> dict[str, list[str]]:
        """The keys of each action, those of one action together."""
        found: dict[str, list[str]] = {}
        ordered = sorted(self._explained.items(), key=lambda item: item[1].binding.description in MOVES)
        for key, active in ordered:
            description = active.binding.description
            if description and not active.binding.system and description not in UNTOLD:
                found.setdefault(description, []).append(KEYS.get(key, key.replace("shift+", "shift ")))
        return found
