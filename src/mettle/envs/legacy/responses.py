"""The functions of `verifiers.utils.response_utils`: what a model's answer says, in messages and tokens."""

from __future__ import annotations

from typing import Any

from mettle.clients.dialects.chat import read_response
from mettle.envs.errors import InvalidModelResponseError
from mettle.records.messages import AssistantMessage, Messages, Response, ResponseTokens


def as_response(answer: Any) -> Response:
    """A `Response` from one, or from a chat completion of the openai package.

    Raises: InvalidModelResponseError when it is neither.
    """
    if isinstance(answer, Response):
        return answer
    if hasattr(answer, "model_dump"):
        answer = answer.model_dump()
    if isinstance(answer, dict):
        return read_response(answer, "an answer given by hand")
    raise InvalidModelResponseError(f"{type(answer).__name__} is no answer of a model")


async def parse_response_messages(response: Any, message_type: str = "chat") -> Messages:
    """What the model said, as one assistant message."""
    return [as_response(response).message.to_assistant()]


async def parse_response_message(response: Any) -> Messages:
    """What the model said, as one assistant message."""
    return await parse_response_messages(response)


async def parse_is_truncated(response: Any, message_type: str = "chat") -> bool:
    """Whether the answer ended for its length."""
    return bool(as_response(response).message.is_truncated)


async def parse_response_tokens(
    response: Any, message_type: str | int | None = None, max_seq_len: int | None = None
) -> ResponseTokens | None:
    """The sampled ids of an answer, cut at `max_seq_len`. Releases before 0.1.11 pass the message type second."""
    limit = message_type if isinstance(message_type, int) else max_seq_len
    tokens = as_response(response).message.tokens
    if not isinstance(tokens, ResponseTokens):
        return None
    if limit is not None:
        tokens.cut(limit)
    return tokens


def assistant_of(response: Any) -> AssistantMessage:
    """What the model said."""
    message: AssistantMessage = as_response(response).message.to_assistant()
    return message
