"""OpenAI chat completions (`POST /chat/completions`), both directions; see the package for the names.

Parts beside those of every dialect: `wire_message` and `wire_tool` (also what other rooms show a conversation as), and
the pieces that answers with several choices or with token ids are made of: `said`, `completion`, `completion_chunk`,
`usage_fields`. Invariant: an answer without a choice, or without text, reasoning and tool calls, is an error and never
an empty message; an empty text that the model did say is a message.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mettle.clients.dialects.call import (
    COMMENT,
    SAMPLING_FIELDS,
    ModelCall,
    WireError,
    WireEvent,
    content_of,
    function_of,
    given,
    invalid,
    max_tokens_of,
    model_of,
    new_id,
    objects,
    openai_error,
    text_of,
    tool_call_of,
    tool_of,
    usage_of,
)
from mettle.clients.dialects.completions import first_choice, response_of_choice
from mettle.clients.errors import EmptyModelResponseError, InvalidModelResponseError
from mettle.records.messages import (
    AssistantMessage,
    Message,
    Response,
    SystemMessage,
    Tool,
    ToolMessage,
    UserMessage,
    content_text,
)
from mettle.records.messages import tool_call_from as flat_tool_call

NAME = "chat"
HEARTBEAT = COMMENT
DONE = WireEvent("[DONE]")
FORWARDED = ("tool_choice", "response_format", "parallel_tool_calls")
FINISH_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter"})
_PART_FIELDS = {"text": "text", "image_url": "image_url", "input_audio": "input_audio", "file": "file"}


# A request that goes out


def request_body(
    model: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """A call as JSON; `fields` are sampling arguments."""
    body: dict[str, Any] = {"model": model, "messages": [wire_message(message) for message in messages]}
    if tools:
        body["tools"] = [wire_tool(tool) for tool in tools]
    return {**body, **fields}


def wire_message(message: Message) -> dict[str, Any]:
    """A message as chat completions wants it: tool calls nested, fields without a value left out."""
    wired = {key: value for key, value in message.items() if value is not None and key != "thinking_blocks"}
    if wired.get("role") == "text":
        wired["role"] = "user"
    if message.get("tool_calls"):
        wired["tool_calls"] = [nested_call(call) for call in message["tool_calls"]]
        wired.setdefault("content", None)
    elif "content" not in wired:
        wired["content"] = ""
    return wired


def wire_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chat completions wants it; one that is nested already passes unchanged."""
    if isinstance(tool.get("function"), Mapping):
        return dict(tool)
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def nested_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call as chat completions has it."""
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": call["name"], "arguments": call["arguments"]},
    }


# An answer that comes in


def read_response(raw: Mapping[str, Any], url: str) -> Response:
    """A chat completion as a `Response`; reads the sampled ids where the endpoint returned them."""
    choice = first_choice(raw, url)
    said = choice.get("message")
    if not isinstance(said, Mapping):
        raise InvalidModelResponseError(f"POST {url}: a choice without a message: {str(choice)[:300]}")
    content = said.get("content")
    if not isinstance(content, str | list | None):
        raise InvalidModelResponseError(
            f"POST {url}: the content is a JSON {type(content).__name__}: {str(said)[:300]}"
        )
    reasoning = said.get("reasoning_content") or said.get("reasoning")
    tool_calls = said.get("tool_calls")
    if content is None and not reasoning and not tool_calls:
        raise EmptyModelResponseError(f"POST {url}: no text, no reasoning and no tool calls in the answer")
    flat_calls = [flat_tool_call(call) for call in tool_calls] if tool_calls else None
    return response_of_choice(raw, choice, content, reasoning, flat_calls)


# A request that comes in


def read_call(body: Mapping[str, Any]) -> ModelCall:
    """The call in a request's body. Raises: InvalidRequest."""
    if body.get("n") not in (None, 1):
        invalid(f"one answer a request is sampled here, and n is {body['n']!r}; send as many requests")
    raw = objects(body.get("messages"), "messages")
    if not raw:
        invalid("messages must not be empty")
    return ModelCall(
        messages=[_message(message) for message in raw],
        tools=[_tool(tool) for tool in objects(body.get("tools"), "tools")],
        model=model_of(body),
        is_stream=bool(body.get("stream")),
        body=body,
        sampling={
            **given(body, SAMPLING_FIELDS),
            **max_tokens_of(body, "max_completion_tokens", "max_tokens"),
        },
        forwarded=given(body, FORWARDED),
    )


def _message(raw: Mapping[str, Any]) -> Message:
    role = raw.get("role")
    if role == "assistant":
        return _assistant(raw)
    content = _content(raw.get("content"), f"the content of a {role} message")
    if role in ("system", "developer"):
        return SystemMessage(content=content)
    if role == "user":
        return UserMessage(content=content)
    if role in ("tool", "function"):
        return ToolMessage(tool_call_id=text_of(raw.get("tool_call_id"), "tool_call_id"), content=content)
    invalid(f"a message has the role {role!r}")


def _assistant(raw: Mapping[str, Any]) -> AssistantMessage:
    content = _content(raw.get("content"), "the content of an assistant message")
    message = AssistantMessage(content=content if isinstance(content, str) else content_text(content))
    reasoning = raw.get("reasoning_content") or raw.get("reasoning")
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    calls = objects(raw.get("tool_calls"), "tool_calls")
    if calls:
        message["tool_calls"] = [_tool_call(call) for call in calls]
        if raw.get("content") is None:
            message["content"] = None
    return message


def _tool_call(call: Mapping[str, Any]) -> Any:
    function = call.get("function")
    if not isinstance(function, dict):
        invalid("a tool call has no function")
    return tool_call_of(call.get("id"), function.get("name"), function.get("arguments"))


def _content(content: Any, what: str) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    return content_of(_part(part, what) for part in objects(content, what))


def _part(part: Mapping[str, Any], what: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "refusal":
        return {"type": "text", "text": text_of(part.get("refusal"), what)}
    if kind not in _PART_FIELDS:
        invalid(f"{what} has a part of type {kind!r}")
    value = part.get(_PART_FIELDS[kind])
    if kind == "text":
        return {"type": "text", "text": text_of(value, what)}
    if not isinstance(value, dict):
        invalid(f"{what} has a part of type {kind!r} without {_PART_FIELDS[kind]}")
    return {"type": kind, kind: value}


def _tool(raw: Mapping[str, Any]) -> Tool:
    if raw.get("type", "function") != "function" or not isinstance(raw.get("function"), dict):
        invalid(f"a tool of type {raw.get('type')!r} cannot be offered to this model; functions can")
    function = function_of(raw)
    return tool_of(
        function.get("name"), function.get("description"), function.get("parameters"), function.get("strict")
    )


# An answer that goes out


def answer_body(call: ModelCall, response: Response) -> dict[str, Any]:
    """A chat completion with one choice."""
    message = response.message
    content = message.content
    finish = message.finish_reason if message.finish_reason in FINISH_REASONS else "stop"
    choice = {
        "index": 0,
        "message": said(content, message.reasoning_content, message.tool_calls or ()),
        "logprobs": None,
        "finish_reason": finish,
    }
    used = usage_of(response)
    usage = {
        **usage_fields(used.prompt_tokens, used.completion_tokens),
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
    }
    return completion(new_id("chatcmpl-"), int(time.time()), call.model, [choice], usage)


def answer_events(call: ModelCall, answer: Mapping[str, Any]) -> Iterator[WireEvent]:
    """The completion in chunks: role, thought, text, each tool call, the end."""
    choice = answer["choices"][0]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message.get("reasoning_content"):
        deltas.append({"reasoning_content": message["reasoning_content"]})
    if message["content"]:
        deltas.append({"content": message["content"]})
    deltas += [{"tool_calls": [delta]} for delta in call_deltas(message.get("tool_calls") or ())]
    head = (answer["id"], answer["created"], answer["model"])
    for delta in deltas:
        yield WireEvent(completion_chunk(*head, [{"index": 0, "delta": delta, "finish_reason": None}]))
    yield WireEvent(completion_chunk(*head, [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]))
    if wants_usage(call.body):
        yield WireEvent(completion_chunk(*head, [], answer["usage"]))
    yield DONE


def wants_usage(body: Mapping[str, Any]) -> bool:
    """`stream_options.include_usage`: whether a stream ends with the token counts."""
    options = body.get("stream_options")
    return isinstance(options, Mapping) and bool(options.get("include_usage"))


def said(content: Any, reasoning: str | None, calls: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the assistant said, thought and called, as a choice has it."""
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    nested = [nested_call(call) for call in calls]
    return {**message, "tool_calls": nested} if nested else message


def call_deltas(nested_calls: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls as a stream has them: with their places."""
    return [{"index": index, **call} for index, call in enumerate(nested_calls)]


def completion(
    answer_id: str, created: int, model: str, choices: list[dict[str, Any]], usage: Mapping[str, Any]
) -> dict[str, Any]:
    """A chat completion."""
    return {
        "id": answer_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage,
    }


def completion_chunk(
    answer_id: str, created: int, model: str, choices: list[dict[str, Any]], usage: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A piece of a chat completion; the one with the usage has no choices."""
    chunk: dict[str, Any] = {
        "id": answer_id,
        "object": "chat.completion.chunk",
        "created": created,
        "model": model,
        "choices": choices,
    }
    return chunk if usage is None else {**chunk, "usage": usage}


def usage_fields(num_prompt: int, num_completion: int) -> dict[str, int]:
    """Token counts in OpenAI's words."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


error_body = openai_error


def error_event(error: WireError) -> WireEvent:
    """An error once a stream has begun."""
    return WireEvent(error_body(error))
