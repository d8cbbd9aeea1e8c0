"""One call of an agent program, whatever API it speaks: what it asks, and how it can be refused.

Parts: `AgentCall`, `Refusal`, `Dialect` (what an API is to the proxy); the readers that the dialects share. Invariant:
what is read is clean (no lone surrogates, no NaN, only fields that we know, text in one part as plain text), so that
the same message reads the same in every call; what cannot be read is a `Refusal` with status 400 and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from mettle.records.messages import Message, Response, Tool, ToolCall, Usage

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
_ESCAPED_SURROGATE = (b"\\ud", b"\\uD")


class Refusal(Exception):
    """A call that gets an error for an answer. `kind` is the word of the Anthropic API, `code` that of OpenAI's."""

    def __init__(self, status: int, kind: str, message: str, *, code: str | None = None, may_retry: bool = False):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.code = code
        self.may_retry = may_retry


@dataclass(slots=True)
class AgentCall:
    """What an agent asked for. `sampling` and `forwarded` are in the words of chat completions."""

    dialect: Dialect
    messages: list[Message]
    tools: list[Tool]
    model: str
    is_stream: bool
    body: Mapping[str, Any]
    sampling: dict[str, Any] = field(default_factory=dict)
    forwarded: dict[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    digest: bytes = b""
    num_retries: int = 0
    previous_response_id: str | None = None


class Dialect(Protocol):
    """An API that agents speak."""

    name: str

    def read(self, body: Mapping[str, Any]) -> AgentCall:
        """The call in a request's body. Raises: Refusal."""
        ...

    def answer(self, call: AgentCall, response: Response) -> dict[str, Any]:
        """The body of the answer."""
        ...

    def events(self, call: AgentCall, answer: Mapping[str, Any]) -> Iterator[bytes]:
        """The same answer as server-sent events."""
        ...

    def heartbeat(self) -> bytes:
        """What keeps a stream alive while the model thinks."""
        ...

    def refusal(self, refusal: Refusal) -> dict[str, Any]:
        """The body of an error."""
        ...

    def refusal_event(self, refusal: Refusal) -> bytes:
        """An error once a stream has begun."""
        ...


def invalid(message: str) -> NoReturn:
    """Refuse a request that cannot be understood."""
    raise Refusal(400, "invalid_request_error", message)


def decoded(raw: bytes) -> dict[str, Any]:
    """A request's body as an object, lone surrogates replaced."""
    body: Any
    try:
        body = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        invalid(f"the body is not JSON: {type(error).__name__}: {str(error)[:200]}")
    if not isinstance(body, dict):
        invalid(f"the body is a JSON {type(body).__name__}; an object is expected")
    if any(escape in raw for escape in _ESCAPED_SURROGATE):
        body = _clean(body)
    cleaned: dict[str, Any] = body
    return cleaned


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return value


def objects(value: Any, what: str) -> list[Mapping[str, Any]]:
    """A list of objects; None is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        invalid(f"{what} must be a list of objects")
    return value


def text_of(value: Any, what: str) -> str:
    """A text; None is an empty one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        invalid(f"{what} must be text, not {type(value).__name__}")
    return value


def content_of(parts: Iterable[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Content from parts: a single text as plain text, so that a message reads alike however it was written."""
    found = list(parts)
    if not found:
        return ""
    if len(found) == 1 and found[0]["type"] == "text":
        return str(found[0]["text"])
    return found


def tool_call_of(call_id: Any, name: Any, arguments: Any) -> ToolCall:
    """A tool call that an agent repeats back to us."""
    if not isinstance(name, str) or not name:
        invalid(f"a tool call has the name {name!r}")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    return ToolCall(id=text_of(call_id, "a tool call's id"), name=name, arguments=arguments or "{}")


def tool_of(name: Any, description: Any, parameters: Any, strict: Any = None) -> Tool:
    """A tool that an agent offers."""
    if not isinstance(name, str) or not name:
        invalid(f"a tool has the name {name!r}")
    if parameters is not None and not isinstance(parameters, dict):
        invalid(f"the parameters of tool {name!r} must be an object, not {type(parameters).__name__}")
    schema = parameters if parameters is not None else {"type": "object", "properties": {}}
    tool = Tool(name=name, description=text_of(description, "a tool's description"), parameters=schema)
    if isinstance(strict, bool):
        tool["strict"] = strict
    return tool


def arguments_object(arguments: Any) -> dict[str, Any]:
    """Arguments as an object, for an API that takes nothing else; text that is none is passed on under a name."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"invalid_arguments": arguments}


def model_of(body: Mapping[str, Any]) -> str:
    """The model that the agent believes to be talking to."""
    return text_of(body.get("model"), "model") or "policy"


def max_tokens_of(body: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """`{"max_tokens": n}` from the first of `names` that is there."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            invalid(f"{name} must be a positive integer, not {value!r}")
        return {"max_tokens": value}
    return {}


def usage_of(response: Response) -> Usage:
    """Token counts of a response, zeros where the endpoint told none."""
    usage = response.usage or Usage()
    prompt, completion = usage.prompt_tokens or 0, usage.completion_tokens or 0
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=usage.cached_tokens or 0,
        reasoning_tokens=usage.reasoning_tokens or 0,
        total_tokens=prompt + completion,
    )


def new_id(prefix: str) -> str:
    """A fresh id."""
    return prefix + os.urandom(12).hex()


def sse(data: Mapping[str, Any], event: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode("utf-8", "replace")
