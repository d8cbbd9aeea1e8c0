"""The functions of `verifiers.utils.message_utils`: making, joining, saving and showing messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mettle.envs.content import ImageUrlContentPart, InputAudioContentPart, TextContentPart
from mettle.envs.rollout_record import plain_messages
from mettle.evals.output import saved_messages
from mettle.records.messages import Message, Messages, Response, ResponseMessage, message_from, messages_from

if TYPE_CHECKING:
    from rich.text import Text

_PARTS = {"text": TextContentPart, "image_url": ImageUrlContentPart, "input_audio": InputAudioContentPart}


def from_raw_message(message: Any) -> Message:
    """A message from a dict, with nested tool calls made flat."""
    return message_from(message)


def from_raw_content_part(part: Any) -> Any:
    """A content part from a dict; one of an unknown type as it is."""
    kind = _PARTS.get(part.get("type", "")) if isinstance(part, Mapping) else None
    return kind(part) if kind else part


def normalize_messages(value: Any, *, field_name: str = "messages") -> Messages:
    """Messages from text, dicts or messages.

    Raises: TypeError, naming `field_name`, for anything else.
    """
    try:
        return messages_from(value)
    except TypeError as error:
        raise TypeError(f"{field_name}: {error}") from error


def maybe_normalize_messages(value: Any, *, field_name: str = "messages") -> Messages:
    """The same as `normalize_messages`: what is a message already stays as it is."""
    return normalize_messages(value, field_name=field_name)


def get_messages(messages: Sequence[Any], role: str | None = None) -> Messages:
    """The messages of one role, or all."""
    return [message for message in messages_from(messages) if role is None or message["role"] == role]


def message_role(message: Any) -> str | None:
    """A message's role, None without one."""
    role = message.get("role") if isinstance(message, Mapping) else getattr(message, "role", None)
    return role if isinstance(role, str) else None


def concat_messages(messages_list: Iterable[Any]) -> Messages:
    """One conversation from several; text becomes a text message."""
    return [message for messages in messages_list for message in messages_from(messages)]


def strip_nones_from_content(messages: Iterable[Any]) -> list[Any]:
    """Messages whose content parts carry no keys without a value, which Arrow adds to dicts of unlike keys."""
    return [_without_nones(message) for message in messages]


def _without_nones(message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    parts = [
        {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else part
        for part in content
    ]
    return message_from({**message, "content": parts})


def sanitize_tool_calls(messages: Any) -> Any:
    """Messages as they are saved: plain dicts whose tool calls are JSON strings. Text stays text."""
    return messages if isinstance(messages, str) else saved_messages(plain_messages(messages_from(messages)))


def serialize_message_for_output(message: Any) -> dict[str, Any]:
    """One message as it is saved."""
    return saved_messages(plain_messages([message_from(message)]))[0]


def serialize_messages_for_output(messages: Any) -> Any:
    """Messages as they are saved."""
    return sanitize_tool_calls(messages)


def message_to_printable(message: Any) -> Any:
    """A message for people: images and audio are named, not shown."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    shown = " ".join(_printable_part(part) for part in message["content"])
    return message_from({**message, "content": shown})


def messages_to_printable(messages: Any) -> Any:
    """Messages for people."""
    return messages if isinstance(messages, str) else [message_to_printable(message) for message in messages or []]


def cleanup_message(message: Any) -> Any:
    """A message without empty fields in its content."""
    return _without_nones(message)


def cleanup_messages(messages: Any) -> Any:
    """Messages without empty fields in their content."""
    return messages if isinstance(messages, str) else strip_nones_from_content(messages)


def format_messages(messages: Any) -> Text:
    """Messages as rich text: role, content and tool calls of each."""
    from rich.text import Text

    text = Text()
    if isinstance(messages, str):
        return text.append(messages)
    for index, message in enumerate(messages_to_printable(messages)):
        text.append("\n\n" if index else "")
        text.append(f"{message.get('role', '')}: ", style="bold")
        text.append(str(message.get("content") or ""))
        for call in message.get("tool_calls") or []:
            called = json.loads(call) if isinstance(call, str) else call
            text.append(f"\n\n[tool call] {called['name']}({called['arguments']})")
    return text


def get_overlong_prompt_dummy_response(message_type: str = "chat") -> Response:
    """An empty answer that ended for its length, for code that returns one instead of raising."""
    message = ResponseMessage(content="", finish_reason="length", is_truncated=True)
    return Response(id="overlong-prompt", created=0, model="", usage=None, message=message)


def _printable_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image_url":
        return "[image]"
    if kind == "input_audio":
        return "[audio]"
    return str(part.get("text", "")) if isinstance(part, Mapping) else str(part)
