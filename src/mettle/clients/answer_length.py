"""How much of an answer is read: the one limit that stands before every parser, reward function and page.

Parts: `MAX_ANSWER_CHARS`, `readable`. Invariant: nothing that is longer reaches an environment, a rubric or a judge's
verdict, whoever wrote their parsers; a parser of ours costs as much as the text is long, so the limit bounds its time.
"""

from __future__ import annotations

from mettle.clients.errors import InvalidModelResponseError
from mettle.records.messages import Response, content_text

MAX_ANSWER_CHARS = 1 << 20
"""Characters of one message, thought and tool calls included: about 250,000 tokens of prose."""


def readable(response: Response) -> Response:
    """The response. Raises: InvalidModelResponseError when its message is longer than anything that is read."""
    message = response.message
    num_chars = len(content_text(message.get("content"))) + len(message.get("reasoning_content") or "")
    num_chars += sum(len(str(call.get("arguments") or "")) for call in message.get("tool_calls") or ())
    if num_chars > MAX_ANSWER_CHARS:
        raise InvalidModelResponseError(
            f"the answer has {num_chars:,} characters, and at most {MAX_ANSWER_CHARS:,} are read; lower max_tokens"
        )
    return response
