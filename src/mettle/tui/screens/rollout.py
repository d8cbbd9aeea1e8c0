"""One rollout: what was said, and what is known of it.

Parts: `RolloutScreen`. Invariant: it holds one row at a time; copying gives what was saved, whole, not what is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget
from textual.widgets import Static

from mettle.errors import MettleError
from mettle.tui.blocks import BODY_CHARS, Block, blocks_of, json_block
from mettle.tui.details import details, facts_line
from mettle.tui.opened import OpenRun
from mettle.tui.parts import BrowserScreen, Page, PromptBar
from mettle.tui.search import Needle
from mettle.tui.transcript import Transcript
from mettle.wording import whole

MORE = 10


class RolloutScreen(BrowserScreen):
    """A conversation, with its figures beside it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "go(-1)", "Previous rollout", show=False),
        Binding("right,l", "go(1)", "Next rollout", key_display="\u2190\u2192"),
        Binding("slash", "search", "Search"),
        Binding("n", "next_match(1)", "Next match", show=False),
        Binding("N", "next_match(-1)", "Previous match", show=False),
        Binding("m", "markdown", "Markdown"),
        Binding("r", "raw", "JSON"),
        Binding("w", "wrap", "Wrap", show=False),
        Binding("y", "copy_message", "Copy"),
        Binding("Y", "copy_rollout", "Copy the conversation", show=False),
        Binding("c", "copy_json", "Copy the saved row as JSON", show=False),
        Binding("t", "task", "Task"),
        Binding("i", "info", "Info"),
        Binding("plus", "more", "More of a long text", show=False),
    ]

    def __init__(
        self, run: OpenRun, index: int, order: Callable[[], Sequence[int]], on_left: Callable[[int], None] | None = None
    ) -> None:
        super().__init__()
        self.run, self.index, self.order = run, index, order
        self.row: Mapping[str, Any] = {}
        self.is_raw = False
        self.transcript = Transcript(id="main")
        self.page = Page(id="side")
        self.line = Static(markup=False, id="head")
        self._on_left = on_left
        self._limit = BODY_CHARS

    def body(self) -> Iterable[Widget]:
        """One line of figures, the conversation, the rest."""
        yield self.line
        yield Horizontal(self.transcript, self.page)

    def path(self) -> Sequence[str]:
        """Environment, model, run, rollout."""
        entry = self.run.reader.entry
        return (entry.env_id, entry.model, self.run.name, f"rollout {self.index}")

    def state(self) -> str:
        """How far the evaluation is."""
        return self.run.progress()

    def on_mount(self) -> None:
        """Show it."""
        super().on_mount()
        self.transcript.focus()
        self.call_after_refresh(self.load)
        self.watch(self.app, "theme", lambda: self.transcript.lay_out(), init=False)

    def load(self) -> None:
        """Read the rollout, and show it from its beginning."""
        try:
            self.row = self.run.reader.row(self.index)
        except MettleError as error:
            self.browser.refuse(str(error))
            return
        self._limit = BODY_CHARS
        facts = self.run.facts(self.index)
        if facts is not None:
            rule = self.run.reader.pass_rule
            self.line.update(facts_line(facts, rule))
            self.page.show(partial(details, self.row, facts, rule))
            self.page.scroll_home(animate=False)
        self._show()
        self.show_path()

    def action_go(self, by: int) -> None:
        """Show the next rollout of the list, or the one before."""
        order = self.order()
        place = order.index(self.index) + by if self.index in order else 0
        if 0 <= place < len(order):
            self.index = order[place]
            self.load()

    def action_back(self) -> None:
        """Leave; the list's cursor goes to where one was."""
        if self.transcript.needle is not self.run.needle or self.is_raw:
            self.is_raw = False
            self.transcript.needle = self.run.needle
            self._show()
            return
        if self._on_left is not None:
            self._on_left(self.index)
        super().action_back()

    def action_markdown(self) -> None:
        """Markdown, or the text as it is."""
        self.transcript.is_markdown = not self.transcript.is_markdown
        self.transcript.lay_out()
        self._say_where()

    def action_wrap(self) -> None:
        """Wrap long lines, or not."""
        self.transcript.is_wrapped = not self.transcript.is_wrapped
        self.transcript.lay_out()
        self._say_where()

    def action_raw(self) -> None:
        """The row as it was saved, or the conversation."""
        self.is_raw = not self.is_raw
        self._show()

    def action_more(self) -> None:
        """More of a text that is too long to show whole."""
        self._limit *= MORE
        top = self.transcript.scroll_offset.y
        self._show()
        self.transcript.scroll_to(y=top, animate=False, immediate=True)

    def action_info(self) -> None:
        """Show or hide what is beside the conversation."""
        self.toggle_side()
        (self.page if self.has_class("-side") and not self.is_wide else self.transcript).focus()

    def action_search(self) -> None:
        """Ask what to look for."""
        needle = self.transcript.needle
        self.prompt.ask("search", "a text in this rollout; n and N go on", needle.text if needle else "")

    def on_prompt_bar_answered(self, event: PromptBar.Answered) -> None:
        """Look for it."""
        self.prompt.close()
        self.transcript.set_needle(Needle(event.text) if event.text else None)
        self._say_where()

    def action_next_match(self, step: int) -> None:
        """Go to the next place; after the last one, to the next rollout that was found."""
        number = self.transcript.match + step
        if 0 <= number < len(self.transcript.matches):
            self.transcript.see_match(number)
        elif self.transcript.needle is self.run.needle and (
            found := self.run.next_found(self.index, step, list(self.order()))
        ) not in (None, self.index):
            assert found is not None, "checked above"
            self.index = found
            self.load()
            if step < 0 and self.transcript.matches:
                self.transcript.see_match(len(self.transcript.matches) - 1)
        elif self.transcript.matches:
            self.transcript.see_match(number % len(self.transcript.matches))
        self._say_where()

    def action_copy_message(self) -> None:
        """Copy the chosen message."""
        if self.transcript.blocks:
            block = self.transcript.blocks[self.transcript.current]
            self.browser.copy(
                block.raw, f"the {block.title}" if block.kind != block.title else block.title, self._source
            )

    def action_copy_rollout(self) -> None:
        """Copy the conversation."""
        text = "\n\n".join(f"## {block.title}\n\n{block.raw}" for block in blocks_of(self.row, 0))
        self.browser.copy(text, "the conversation", self._source)

    def action_copy_json(self) -> None:
        """Copy the row as it was saved."""
        self.browser.copy(json.dumps(self.row, ensure_ascii=False, indent=2), "the saved row", self._source)

    def action_task(self) -> None:
        """Show the rollouts of the same task."""
        self.browser.open_task(self.run, self.index)

    @property
    def _source(self) -> str:
        return f"{self.run.name}-rollout-{self.index}"

    def _show(self) -> None:
        blocks: list[Block] = [json_block(self.row, self._limit)] if self.is_raw else blocks_of(self.row, self._limit)
        needle = self.transcript.needle or self.run.needle
        self.transcript.needle = needle
        self.transcript.show(blocks)
        if self.transcript.matches:
            self.transcript.see_match(0)
        self._say_where()

    def _say_where(self) -> None:
        order = self.order()
        place = order.index(self.index) + 1 if self.index in order else 0
        parts = [f"{whole(place)} of {whole(len(order))}"]
        transcript = self.transcript
        if transcript.needle is not None:
            here = transcript.match + 1 if transcript.matches else 0
            parts.append(f"{transcript.needle.text!r}: {whole(here)} of {whole(len(transcript.matches))} places")
        if self.is_raw:
            parts.append("saved row")
        elif not transcript.is_markdown or transcript.matches:
            parts.append("plain text")
        if not transcript.is_wrapped:
            parts.append("not wrapped, shift+\u2190\u2192")
        self.say("  |  ".join(parts))
