"""Chat completions as agents speak it.

Parts: `ChatDialect`. Invariant: what `answer` says reads back, by `read`, as the message that the model said.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from mettle.envs.proxy.calls import (
    SAMPLING_FIELDS,
    AgentCall,
    Refusal,
    content_of,
    invalid,
    max_tokens_of,
    model_of,
    new_id,
    objects,
    sse,
    text_of,
    tool_call_of,
    tool_of,
    usage_of,
)
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

FORWARDED_FIELDS = ("tool_choice", "response_format", "parallel_tool_calls")
FINISH_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter"})
_PART_FIELDS = {"text": "text", "image_url": "image_url", "input_audio": "input_audio", "file": "file"}


class ChatDialect:
    """`POST /v1/chat/completions`."""

    name = "chat"

    def read(self, body: Mapping[str, Any]) -> AgentCall:
        """The call in a request's body."""
        if body.get("n") not in (None, 1):
            invalid(f"one answer a request is sampled here, and n is {body['n']!r}; send as many requests")
        raw = objects(body.get("messages"), "messages")
        if not raw:
            invalid("messages must not be empty")
        return AgentCall(
            dialect=self,
            messages=[_message(message) for message in raw],
            tools=[_tool(tool) for tool in objects(body.get("tools"), "tools")],
            model=model_of(body),
            is_stream=bool(body.get("stream")),
            body=body,
            sampling={
                **{name: body[name] for name in SAMPLING_FIELDS if body.get(name) is not None},
                **max_tokens_of(body, "max_completion_tokens", "max_tokens"),
            },
            forwarded={name: body[name] for name in FORWARDED_FIELDS if body.get(name) is not None},
        )

    def answer(self, call: AgentCall, response: Response) -> dict[str, Any]:
        """A chat completion."""
        said = response.message
        message: dict[str, Any] = {"role": "assistant", "content": said.content}
        if said.reasoning_content:
            message["reasoning_content"] = said.reasoning_content
        if said.tool_calls:
            message["tool_calls"] = [
                {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
                for c in said.tool_calls
            ]
        finish = said.finish_reason if said.finish_reason in FINISH_REASONS else "stop"
        return {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": call.model,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish}],
            "usage": _usage(response),
        }

    def events(self, call: AgentCall, answer: Mapping[str, Any]) -> Iterator[bytes]:
        """The completion in chunks: role, thought, text, each tool call, the end."""
        choice = answer["choices"][0]
        message = choice["message"]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if message.get("reasoning_content"):
            deltas.append({"reasoning_content": message["reasoning_content"]})
        if message["content"]:
            deltas.append({"content": message["content"]})
        for index, tool_call in enumerate(message.get("tool_calls") or ()):
            deltas.append({"tool_calls": [{"index": index, **tool_call}]})
        head = {key: answer[key] for key in ("id", "created", "model")}
        head["object"] = "chat.completion.chunk"
        for delta in deltas:
            yield sse({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        yield sse({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
        options = call.body.get("stream_options")
        if isinstance(options, Mapping) and options.get("include_usage"):
            yield sse({**head, "choices": [], "usage": answer["usage"]})
        yield b"data: [DONE]\n\n"

    def heartbeat(self) -> bytes:
        """A comment, which every reader of events passes over."""
        return b": waiting for the model\n\n"

    def refusal(self, refusal: Refusal) -> dict[str, Any]:
        """OpenAI's error body."""
        error = {"message": refusal.message, "type": refusal.kind, "param": None, "code": refusal.code}
        return {"error": error}

    def refusal_event(self, refusal: Refusal) -> bytes:
        """An error inside a stream."""
        return sse(self.refusal(refusal))


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
    function = raw.get("function")
    if raw.get("type", "function") != "function" or not isinstance(function, dict):
        invalid(f"a tool of type {raw.get('type')!r} cannot be offered to this model; functions can")
    return tool_of(
        function.get("name"), function.get("description"), function.get("parameters"), function.get("strict")
    )


def _usage(response: Response) -> dict[str, Any]:
    usage = usage_of(response)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
