"""Reading an answer out of what the model said.

Parts: `Parser`, which hands the last assistant message to a function. Invariant: a parser looks at a completion, as
text or as messages, and never changes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from mettle.records.messages import content_text

Extract = Callable[[str], Any]


def _unchanged(text: str) -> Any:
    return text


class Parser:
    """`parse(text)` applies `extract_fn`; `parse_answer(completion)` does so to the last assistant message."""

    def __init__(self, extract_fn: Extract = _unchanged) -> None:
        self.extract_fn = extract_fn
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")

    def parse(self, text: str) -> Any:
        """What `text` says."""
        return self.extract_fn(text)

    def get_assistant_messages(self, completion: Any) -> list[Any]:
        """The assistant's messages in `completion`."""
        return _by_role(completion, "assistant")

    def get_system_messages(self, completion: Any) -> list[Any]:
        """The system messages in `completion`."""
        return _by_role(completion, "system")

    def get_user_messages(self, completion: Any) -> list[Any]:
        """The user's messages in `completion`."""
        return _by_role(completion, "user")

    def get_tool_messages(self, completion: Any) -> list[Any]:
        """The tools' messages in `completion`."""
        return _by_role(completion, "tool")

    def parse_answer(self, completion: Any) -> Any:
        """`parse` of the last assistant message, or of the text itself; None when nobody said anything."""
        if isinstance(completion, str):
            return self.parse(completion)
        messages = self.get_assistant_messages(completion)
        return self.parse(message_text(messages[-1])) if messages else None

    def get_format_reward_func(self) -> Callable[..., float]:
        """A reward function for the format; a plain parser has none to ask for."""

        def format_reward_func(completion: Any, **_: Any) -> float:
            return 1.0

        return format_reward_func


def message_text(message: Any) -> str:
    """The content of a message as text."""
    return content_text(message.get("content"))


def _by_role(completion: Any, role: str) -> list[Any]:
    if isinstance(completion, str):
        return []
    return [message for message in completion or [] if message.get("role") == role]
