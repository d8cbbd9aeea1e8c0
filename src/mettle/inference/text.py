"""Text as it grows: whole characters only, nothing of a stop string, thoughts and tool calls told apart.

`GrowingText` turns token ids into text deltas; `TurnSplitter` sorts an assistant's text into thought, content and what
may be tool calls. Invariant: joined together, the deltas are what the same tokens give when read at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from mettle.clients.renderer import Renderer
from mettle.clients.tool_parser import THINK_CLOSE, THINK_OPEN, TOOL_OPEN

_INCOMPLETE = "�"
_MAX_CHARACTER_BYTES = 4
_MAX_PENDING = 16
"""Tokens without a whole character at their end that are read together; more of them are no text."""

PartKind = Literal["reasoning", "content"]


class TurnPart(NamedTuple):
    """A piece of an assistant's turn."""

    kind: PartKind
    text: str


def cut_at_stop(text: str, stop: str | None) -> str:
    """The text before the stop string that ended it."""
    return text if stop is None else text.partition(stop)[0]


class GrowingText:
    """Text of a completion, delta by delta."""

    def __init__(self, renderer: Renderer, stops: Sequence[str] = ()) -> None:
        self._renderer = renderer
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._start = 0  # tokens before it are fully read
        self._read = ""  # text of the tokens since `_start` that was given out or is held
        self._held = ""  # may be the beginning of a stop string

    def add(self, token_id: int) -> str:
        """What one more token adds that can be shown already."""
        self._ids.append(token_id)
        text = self._renderer.visible_text(self._ids[self._start :])
        num_pending = len(self._ids) - self._start
        is_whole = not text.endswith(_INCOMPLETE)
        if not is_whole and num_pending < _MAX_PENDING:
            return ""
        # Some tokenizers write a token differently at the start of a text, so one token of context is kept. Bytes that
        # are no text never become whole: then what may still become a character is kept, lest each token cost more.
        delta = (text if is_whole else text.removesuffix(_INCOMPLETE))[len(self._read) :]
        self._start = len(self._ids) - (1 if is_whole else _MAX_CHARACTER_BYTES)
        read = self._renderer.visible_text(self._ids[self._start :])
        self._read = read if is_whole else read.removesuffix(_INCOMPLETE)
        return self._hold_back(delta)

    def finish(self, stop: str | None) -> str:
        """What was held, up to the stop string that ended the completion, if one did."""
        rest = self._held + self._renderer.visible_text(self._ids[self._start :])[len(self._read) :]
        self._held = self._read = ""
        self._start = len(self._ids)
        return cut_at_stop(rest, stop)

    def _hold_back(self, delta: str) -> str:
        text = self._held + delta
        found = [position for stop in self._stops if (position := text.find(stop)) >= 0]
        keep = min(found, default=len(text) - max((_overlap(text, stop) for stop in self._stops), default=0))
        self._held = text[keep:]
        return text[:keep]


class TurnSplitter:
    """Sorts text deltas. After a tool call has begun, all text is kept back for the parser (`tail`).

    What is held back is kept apart from `_buffer`, so that a delta costs what it is long, however much is held.
    """

    def __init__(self, *, has_tools: bool, is_thinking: bool) -> None:
        self._has_tools = has_tools
        self._state: Literal["start", "reasoning", "after", "content", "tools"] = (
            "reasoning" if is_thinking else "start"
        )
        self._is_reasoning_start = is_thinking
        self._buffer = ""  # not looked at yet, or the beginning of a mark
        self._held: list[str] = []  # before the buffer: space that may belong to a mark, or all from a tool call's on

    @property
    def tail(self) -> str:
        """Text from the first tool call's mark on, and the newlines before it."""
        return "".join(self._held) + self._buffer if self._state == "tools" else ""

    def add(self, delta: str) -> list[TurnPart]:
        """The parts that a delta completes."""
        self._buffer += delta
        return self._steps(is_last=False)

    def finish(self) -> list[TurnPart]:
        """What was kept back because a mark might have begun there."""
        return self._steps(is_last=True)

    def _steps(self, *, is_last: bool) -> list[TurnPart]:
        parts: list[TurnPart] = []
        while (step := self._step(is_last=is_last)) is not None:
            parts.append(step)
        return [part for part in parts if part.text]

    def _step(self, *, is_last: bool) -> TurnPart | None:
        """Take one part off the buffer; None when more text is needed."""
        if self._state == "start":
            return self._leave_start(is_last)
        if self._state == "reasoning":
            return self._read_reasoning(is_last)
        if self._state == "after":
            self._buffer = self._buffer.lstrip("\n")
            if self._buffer:
                self._state = "content"
        if self._state == "content":
            return self._read_content(is_last)
        if self._state == "tools":
            self._hold(len(self._buffer))
        return None

    def _leave_start(self, is_last: bool) -> TurnPart | None:
        text = self._buffer.lstrip()
        self._hold(len(self._buffer) - len(text))
        if text.startswith(THINK_OPEN):
            self._buffer, self._held = text[len(THINK_OPEN) :], []
            self._state, self._is_reasoning_start = "reasoning", True
        elif THINK_OPEN.startswith(text) and not is_last:
            return None
        else:
            self._buffer, self._held = self._released() + text, []
            self._state = "content"
        return TurnPart("content", "")

    def _read_reasoning(self, is_last: bool) -> TurnPart | None:
        if self._is_reasoning_start:
            self._buffer = self._buffer.lstrip("\n")
        before, close, rest = self._buffer.partition(THINK_CLOSE)
        if close:
            shown = before.rstrip("\n")
            said = self._released() + shown if shown else ""
            self._buffer, self._state, self._held = rest, "after", []
            return TurnPart("reasoning", said)
        if is_last:
            shown = before.rstrip("\n")
            said = self._released() + shown if shown else ""
            self._buffer, self._held = "", []
            return TurnPart("reasoning", said) if before else None
        # Newlines at the end may turn out to belong to the closing mark.
        return self._take_text(before, len(before) - _overlap(before, THINK_CLOSE), "reasoning")

    def _read_content(self, is_last: bool) -> TurnPart | None:
        if not self._has_tools:
            return self._take(len(self._buffer), "content")
        before, mark, _ = self._buffer.partition(TOOL_OPEN)
        if mark:
            shown = before.rstrip("\n")
            said = self._released() + shown if shown else ""
            self._buffer, self._held = self._buffer[len(shown) :], [] if shown else self._held
            self._state = "tools"
            return TurnPart("content", said)
        if is_last:
            return self._take(len(before), "content")
        return self._take_text(before, len(before) - _overlap(before, TOOL_OPEN), "content")

    def _take_text(self, text: str, length: int, kind: PartKind) -> TurnPart | None:
        """Take the buffer's first `length` characters, and hold the newlines at their end."""
        shown = len(text[:length].rstrip("\n"))
        part = self._take(shown, kind) if shown else None
        self._hold(length - shown)
        return part

    def _take(self, length: int, kind: PartKind) -> TurnPart | None:
        text = self._released() + self._buffer[:length]
        self._buffer, self._held = self._buffer[length:], []
        self._is_reasoning_start = self._is_reasoning_start and not text
        return TurnPart(kind, text) if text else None

    def _hold(self, length: int) -> None:
        if length:
            self._held.append(self._buffer[:length])
            self._buffer = self._buffer[length:]

    def _released(self) -> str:
        return "".join(self._held)


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
