"""Parsers for models that think aloud: `ThinkParser` demands `<think>`, `MaybeThinkParser` allows for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mettle.envs.parsers.parser import Extract, Parser, _unchanged, message_text


class ThinkParser(Parser):
    """The text after the last `</think>`; text without the tag holds no answer.

    An endpoint that returns the thinking as `reasoning_content` strips the tag; use `MaybeThinkParser` there.
    """

    def __init__(self, extract_fn: Extract = _unchanged) -> None:
        super().__init__(extract_fn)
        self.logger.info("ThinkParser gives no answer where the endpoint strips <think>; MaybeThinkParser does")

    def parse(self, text: str) -> Any:
        """`extract_fn` of what follows the thinking, of "" without any."""
        return self.extract_fn(text.split("</think>")[-1].strip() if "</think>" in text else "")

    def get_format_reward_func(self) -> Callable[..., float]:
        """Share of assistant messages that think exactly once, first, and then say something."""

        def format_reward_func(completion: Any, **_: Any) -> float:
            texts = [message_text(message) for message in self.get_assistant_messages(completion)]
            return sum(_is_well_formed(text) for text in texts) / len(texts) if texts else 0.0

        return format_reward_func


class MaybeThinkParser(Parser):
    """The text after the last `</think>`, or the whole text."""

    def parse(self, text: str) -> Any:
        """`extract_fn` of what follows the thinking, if there was any."""
        return self.extract_fn(text.split("</think>")[-1].strip() if "</think>" in text else text)


def _is_well_formed(text: str) -> float:
    text = text.strip()
    once = text.count("<think>") == 1 and text.count("</think>") == 1
    return 1.0 if text.startswith("<think>") and once and text.split("</think>")[-1].strip() else 0.0
