"""What the dialects share: a call, readers that complain, and the pieces of an answer that several have.

Parts: `ModelCall` (what is asked for, whatever API it came by), `InvalidRequest` and the readers that raise it;
`readable` (any answer, with whatever is wrong with it as one error). Invariants: what is read is clean (no lone
surrogates, no NaN, only fields that we know, text in one part as plain text), so that the same message reads the same
in every call; an answer is a `Response` or a `RolloutError`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol

from mettle.clients.errors import InvalidModelResponseError
from mettle.clients.wire import well_formed
from mettle.errors import RolloutError, UserError
from mettle.records.messages import Message, Response, Tool, ToolCall, Usage

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
COMMENT = ": waiting for the model\n\n"
"""What keeps a stream alive while the model thinks; every reader of events passes over it."""

ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""The word of an error by its status; any other is "api_error"."""


class InvalidRequest(UserError):
    """A request that cannot be understood: status 400."""


@dataclass(slots=True)
class ModelCall:
    """What is asked of a model. `sampling` and `forwarded` are in the words of chat completions."""

    messages: list[Message]
    tools: list[Tool]
    model: str
    is_stream: bool
    body: Mapping[str, Any]
    sampling: dict[str, Any] = field(default_factory=dict)
    forwarded: dict[str, Any] = field(default_factory=dict)
    previous_response_id: str | None = None


class WireEvent(NamedTuple):
    """A server-sent event before it is written."""

    data: Mapping[str, Any] | str
    event: str | None = None


class WireError(NamedTuple):
    """An error that an answer is to say, in any dialect."""

    status: int
    message: str
    code: str | None = None

    @property
    def kind(self) -> str:
        return ERROR_TYPES.get(self.status, "api_error")


class ServedDialect(Protocol):
    """What a dialect is to a server; the modules of this package that can be served are such."""

    @property
    def NAME(self) -> str: ...
    @property
    def HEARTBEAT(self) -> WireEvent | str: ...
    def read_call(self, body: Mapping[str, Any]) -> ModelCall: ...
    def answer_body(self, call: ModelCall, response: Response) -> dict[str, Any]: ...
    def answer_events(self, call: ModelCall, answer: Mapping[str, Any]) -> Iterator[WireEvent]: ...
    def error_body(self, error: WireError) -> dict[str, Any]: ...
    def error_event(self, error: WireError) -> WireEvent: ...


# Requests that come in


def invalid(message: str) -> NoReturn:
    raise InvalidRequest(message)


def decoded_request(raw: bytes) -> dict[str, Any]:
    """A request's body as an object, lone surrogates replaced."""
    body: Any
    try:
        body = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        invalid(f"the body is not JSON: {type(error).__name__}: {str(error)[:200]}")
    if not isinstance(body, dict):
        invalid(f"the body is a JSON {type(body).__name__}; an object is expected")
    if b"\\ud" in raw or b"\\uD" in raw:
        well_formed(body)
    return body


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


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
    """A tool call that somebody repeats back to us."""
    if not isinstance(name, str) or not name:
        invalid(f"a tool call has the name {name!r}")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    return ToolCall(id=text_of(call_id, "a tool call's id"), name=name, arguments=arguments or "{}")


def tool_of(name: Any, description: Any, parameters: Any, strict: Any = None) -> Tool:
    """A tool that is offered."""
    if not isinstance(name, str) or not name:
        invalid(f"a tool has the name {name!r}")
    if parameters is not None and not isinstance(parameters, dict):
        invalid(f"the parameters of tool {name!r} must be an object, not {type(parameters).__name__}")
    schema = parameters if parameters is not None else {"type": "object", "properties": {}}
    tool = Tool(name=name, description=text_of(description, "a tool's description"), parameters=schema)
    if isinstance(strict, bool):
        tool["strict"] = strict
    return tool


def given(body: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The fields of `names` that have a value."""
    return {name: body[name] for name in names if body.get(name) is not None}


def model_of(body: Mapping[str, Any]) -> str:
    """The model that the caller believes to be talking to."""
    return text_of(body.get("model"), "model") or "policy"


def max_tokens_of(body: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """`{"max_tokens": n}` from the first of `names` that is there."""
    for name, value in given(body, names).items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            invalid(f"{name} must be a positive integer, not {value!r}")
        return {"max_tokens": value}
    return {}


# Both directions


def arguments_object(arguments: Any) -> dict[str, Any]:
    """Arguments as an object, for an API that takes nothing else; text that is none is passed on under a name."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"invalid_arguments": arguments}


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool's name, description and parameters, whether it is flat or nested as in chat completions."""
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool


# Answers


def readable(reader: Callable[[Mapping[str, Any], str], Response], raw: Mapping[str, Any], url: str) -> Response:
    """The answer `raw` of `url`, by `reader`.

    Raises: InvalidModelResponseError when a field has a shape that `reader` does not know, and what `reader` raises.
    """
    try:
        return reader(raw, url)
    except RolloutError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        excerpt = json.dumps(raw, default=str)[:300]
        reason = f"{type(error).__name__}: {error}"
        raise InvalidModelResponseError(f"POST {url}: an answer that cannot be read ({reason}): {excerpt}") from error


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
    return prefix + os.urandom(12).hex()


def openai_error(error: WireError) -> dict[str, Any]:
    """The error body of OpenAI's APIs."""
    return {"error": {"message": error.message, "type": error.kind, "param": None, "code": error.code}}
