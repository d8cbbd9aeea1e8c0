"""A model that says what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mettle.clients.base import Client
from mettle.records.messages import Response, ResponseMessage, ResponseTokens, Usage


class Scripted(Client):
    """Answers with `say(prompt)`: text, a dict of message fields, or an exception to raise."""

    base_url = "http://scripted/v1"

    def __init__(self, say: Callable[[Any], Any] | str) -> None:
        self.say = say if callable(say) else lambda _: say
        self.calls: list[dict[str, Any]] = []

    async def get_response(self, prompt, model, sampling_args=None, tools=None, **extra):
        self.calls.append({"prompt": list(prompt), "sampling_args": sampling_args, "tools": tools, **extra})
        said = self.say(prompt)
        if isinstance(said, BaseException):
            raise said
        fields = {"content": said} if isinstance(said, str) else dict(said)
        fields = {"finish_reason": "stop", "is_truncated": False, "content": None, **fields}
        usage = Usage(prompt_tokens=10, completion_tokens=3, total_tokens=13)
        return Response(id="r", created=0, model=model, usage=usage, message=ResponseMessage(**fields))


@pytest.fixture
def scripted() -> type[Scripted]:
    return Scripted


@pytest.fixture
def tokens() -> type[ResponseTokens]:
    return ResponseTokens
