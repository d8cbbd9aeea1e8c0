"""Anthropic's Messages API as agents speak it.

Parts: `MessagesDialect`. Invariant: what `answer` says reads back, by `read`, as the message that the model said. Marks
for the prompt cache are left out, because agents move them from call to call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mettle.envs.proxy.calls import (
    AgentCall,
    Refusal,
    arguments_object,
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
)

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
TOOL_CHOICES: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none"}
THOUGHTS = ("thinking", "redacted_thinking")


class MessagesDialect:
    """`POST /v1/messages`."""

    name = "messages"

    def read(self, body: Mapping[str, Any]) -> AgentCall:
        """The call in a request's body."""
        turns = objects(body.get("messages"), "messages")
        if not turns:
            invalid("messages must not be empty")
        messages: list[Message] = [message for turn in turns for message in _turn(turn)]
        if body.get("system"):
            system = content_of(_blocks(body["system"], "system"))
            messages.insert(0, SystemMessage(content=system))
        sampling = {name: body[name] for name in ("temperature", "top_p", "top_k") if body.get(name) is not None}
        if body.get("stop_sequences"):
            sampling["stop"] = body["stop_sequences"]
        return AgentCall(
            dialect=self,
            messages=messages,
            tools=[tool for raw in objects(body.get("tools"), "tools") if (tool := _tool(raw)) is not None],
            model=model_of(body),
            is_stream=bool(body.get("stream")),
            body=body,
            sampling={**sampling, **max_tokens_of(body, "max_tokens")},
            forwarded=_forwarded(body.get("tool_choice")),
        )

    def answer(self, call: AgentCall, response: Response) -> dict[str, Any]:
        """A message."""
        usage = usage_of(response)
        return {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": call.model,
            "content": _answer_blocks(response),
            "stop_reason": STOP_REASONS.get(response.message.finish_reason or "stop", "end_turn"),
            "stop_sequence": None,
            "usage": {
                "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": usage.cached_tokens,
                "output_tokens": usage.completion_tokens,
            },
        }

    def events(self, call: AgentCall, answer: Mapping[str, Any]) -> Iterator[bytes]:
        """The message block by block."""
        usage = answer["usage"]
        started = {**answer, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
        yield sse({"type": "message_start", "message": started}, "message_start")
        for index, block in enumerate(answer["content"]):
            empty, deltas = _block_deltas(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        ended = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
        yield _event("message_delta", delta=ended, usage=usage)
        yield _event("message_stop")

    def heartbeat(self) -> bytes:
        """Anthropic's own."""
        return _event("ping")

    def refusal(self, refusal: Refusal) -> dict[str, Any]:
        """Anthropic's error body."""
        return {"type": "error", "error": {"type": refusal.kind, "message": refusal.message}, "request_id": None}

    def refusal_event(self, refusal: Refusal) -> bytes:
        """An error inside a stream."""
        return sse(self.refusal(refusal), "error")


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _turn(turn: Mapping[str, Any]) -> list[Message]:
    """A turn as messages: what tools said comes before what the user adds to it."""
    role = turn.get("role")
    if role not in ("user", "assistant", "system"):
        invalid(f"a message has the role {role!r}")
    content = turn.get("content")
    if role == "assistant":
        return [_assistant(content)]
    if role == "system":
        return [SystemMessage(content=content_of(_blocks(content, "the content of a system message")))]
    if isinstance(content, str):
        return [UserMessage(content=content)]
    blocks = objects(content, "the content of a user message")
    results: list[Message] = [_tool_result(block) for block in blocks if block.get("type") == "tool_result"]
    rest = [block for block in blocks if block.get("type") != "tool_result"]
    if results and not rest:
        return results
    return [*results, UserMessage(content=content_of(_blocks(rest, "the content of a user message")))]


def _assistant(content: Any) -> AssistantMessage:
    if isinstance(content, str):
        return AssistantMessage(content=content)
    blocks = objects(content, "the content of an assistant message")
    texts = [text_of(b.get("text"), "text") for b in blocks if b.get("type") == "text"]
    calls = [tool_call_of(b.get("id"), b.get("name"), b.get("input")) for b in blocks if b.get("type") == "tool_use"]
    thoughts = [block for block in blocks if block.get("type") in THOUGHTS]
    message = AssistantMessage(content="".join(texts) if texts or not calls else None)
    reasoning = "\n".join(text_of(block.get("thinking"), "thinking") for block in thoughts)
    if reasoning:
        message["reasoning_content"] = reasoning
    if any(block.get("signature") or block.get("data") for block in thoughts):
        message["thinking_blocks"] = [dict(block) for block in thoughts]
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_result(block: Mapping[str, Any]) -> ToolMessage:
    content = content_of(_blocks(block.get("content"), "a tool result"))
    if not content and block.get("is_error"):
        content = "error"
    return ToolMessage(tool_call_id=text_of(block.get("tool_use_id"), "tool_use_id"), content=content)


def _blocks(content: Any, what: str) -> Iterator[dict[str, Any]]:
    if isinstance(content, str):
        yield {"type": "text", "text": content}
        return
    for block in objects(content, what):
        yield _part(block, what)


def _part(block: Mapping[str, Any], what: str) -> dict[str, Any]:
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": text_of(block.get("text"), what)}
    source = block.get("source")
    if kind == "image" and isinstance(source, dict):
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return {"type": "text", "text": text_of(source.get("data"), what)}
    if kind == "tool_reference":
        return {"type": "text", "text": text_of(block.get("tool_name"), what)}
    invalid(f"{what} has a block of type {kind!r}")


def _tool(raw: Mapping[str, Any]) -> Tool | None:
    """A tool; one that Anthropic's servers run themselves cannot be offered and is left out."""
    if raw.get("type", "custom") != "custom":
        return None
    return tool_of(raw.get("name"), raw.get("description"), raw.get("input_schema"))


def _forwarded(choice: Any) -> dict[str, Any]:
    if not isinstance(choice, dict):
        return {}
    kind = choice.get("type")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    wanted = named if kind == "tool" else TOOL_CHOICES.get(kind)
    forwarded = {"tool_choice": wanted} if wanted not in (None, "auto") else {}
    return {**forwarded, "parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else forwarded


def _answer_blocks(response: Response) -> list[dict[str, Any]]:
    said = response.message
    thoughts = [dict(block) for block in said.thinking_blocks or () if block.get("type") in THOUGHTS]
    if not thoughts and said.reasoning_content:
        thoughts = [{"type": "thinking", "thinking": said.reasoning_content, "signature": ""}]
    texts = [{"type": "text", "text": said.content}] if said.content else []
    calls = [
        {"type": "tool_use", "id": call["id"], "name": call["name"], "input": arguments_object(call["arguments"])}
        for call in said.tool_calls or ()
    ]
    return [*thoughts, *texts, *calls]


def _block_deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it starts, and what is then added to it."""
    kind = block["type"]
    if kind == "text":
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if kind == "tool_use":
        added = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        return {**block, "input": {}}, [added]
    if kind == "thinking":
        thought = {"type": "thinking_delta", "thinking": block.get("thinking") or ""}
        signature = {"type": "signature_delta", "signature": block.get("signature") or ""}
        return {"type": "thinking", "thinking": "", "signature": ""}, [thought, signature]
    return dict(block), []
