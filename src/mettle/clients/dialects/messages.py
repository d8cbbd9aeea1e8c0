"""Anthropic's Messages API (`POST /messages`), both directions; see the package for the names.

The system text stands apart, and what tools said stands inside the user's turn. Signed thoughts go back exactly as they
came, unsigned ones (another model's) never, because the API refuses them. Marks for the prompt cache are left out,
because callers move them from call to call. Invariant: an answer without text, thought and tool calls is an error.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mettle.clients.dialects.call import (
    ModelCall,
    WireError,
    WireEvent,
    arguments_object,
    content_of,
    function_of,
    given,
    invalid,
    max_tokens_of,
    model_of,
    new_id,
    objects,
    text_of,
    tool_call_of,
    tool_of,
    usage_of,
)
from mettle.clients.errors import EmptyModelResponseError, InvalidModelResponseError, ModelError
from mettle.records.messages import (
    AssistantMessage,
    Message,
    Response,
    ResponseMessage,
    SystemMessage,
    Tool,
    ToolCall,
    ToolMessage,
    Usage,
    UserMessage,
    content_text,
)

logger = logging.getLogger(__name__)

NAME = "messages"
HEARTBEAT = WireEvent({"type": "ping"}, "ping")
DEFAULT_MAX_TOKENS = 8192
FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
TOOL_CHOICES: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none"}
THOUGHTS = ("thinking", "redacted_thinking")
UNKNOWN_FIELDS = frozenset(
    {"n", "seed", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty", "logit_bias", "return_token_ids"}
    | {"modalities", "stream", "parallel_tool_calls"}
)


# A request that goes out


def request_body(
    model: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """A call as JSON; `fields` are sampling arguments in the words of chat completions."""
    system, turns = wire_conversation(messages)
    body: dict[str, Any] = {"model": model, "messages": turns}
    if system:
        body["system"] = system
    if tools:
        body["tools"] = [wire_tool(tool) for tool in tools]
    return {**body, **wire_fields(fields, has_tools=bool(tools))}


def wire_conversation(messages: Sequence[Message]) -> tuple[str, list[dict[str, Any]]]:
    """The system text, and the turns. Neighbours of one role become one turn, as the API has them."""
    system: list[str] = []
    turns: list[dict[str, Any]] = []
    for message in messages:
        role = message.get("role")
        if role in ("system", "developer") and not turns:
            system.append(content_text(message.get("content")))
            continue
        if role == "assistant":
            speaker, blocks = "assistant", _assistant_blocks(message)
        elif role == "tool":
            speaker, blocks = "user", [_tool_result_block(message)]
        else:
            speaker, blocks = "user", wire_parts(message.get("content"))
        if not blocks:
            continue
        if turns and turns[-1]["role"] == speaker:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": speaker, "content": blocks})
    return "\n\n".join(text for text in system if text), turns


def wire_parts(content: Any) -> list[dict[str, Any]]:
    """Text and images as blocks; empty text is left out, because the API refuses it."""
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    blocks = (_block(part) for part in content)
    return [block for block in blocks if block.get("text") != ""]


def _block(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type")
    if kind in ("text", "input_text"):
        return {"type": "text", "text": part.get("text") or ""}
    if kind == "image_url":
        image = part.get("image_url")
        return {"type": "image", "source": _image_source(image["url"] if isinstance(image, Mapping) else str(image))}
    if kind in ("image", "document"):
        return dict(part)
    raise ModelError(f"the Messages API takes text and images, and a message has a part of type {kind!r}")


def _image_source(url: str) -> dict[str, Any]:
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    head, _, data = url[len("data:") :].partition(",")
    return {"type": "base64", "media_type": head.partition(";")[0] or "image/png", "data": data}


def _assistant_blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    thoughts = [dict(block) for block in message.get("thinking_blocks") or () if block.get("type") in THOUGHTS]
    calls = [
        {"type": "tool_use", "id": call["id"], "name": call["name"], "input": arguments_object(call.get("arguments"))}
        for call in message.get("tool_calls") or ()
    ]
    return [*thoughts, *wire_parts(message.get("content")), *calls]


def _tool_result_block(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    said: Any = content if isinstance(content, str) else wire_parts(content)
    block = {"type": "tool_result", "tool_use_id": message.get("tool_call_id") or "", "content": said}
    return {**block, "is_error": True} if message.get("is_error") else block


def wire_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as the Messages API wants it."""
    source = function_of(tool)
    schema = source.get("parameters") or {"type": "object", "properties": {}}
    wired = {"name": source["name"], "input_schema": schema}
    return {**wired, "description": source["description"]} if source.get("description") else wired


def wire_fields(asked: Mapping[str, Any], *, has_tools: bool) -> dict[str, Any]:
    """Sampling arguments in this API's words. Raises: ModelError for one that it cannot honour."""
    if (asked.get("n") or 1) != 1:
        raise ModelError(f"the Messages API samples one answer a request, not n={asked['n']}")
    fields = {key: value for key, value in asked.items() if key not in UNKNOWN_FIELDS}
    dropped = sorted(set(asked) & UNKNOWN_FIELDS - {"n", "stream", "parallel_tool_calls"})
    if dropped:
        logger.debug("the Messages API knows no %s", dropped)
    limit = fields.pop("max_completion_tokens", None)
    fields["max_tokens"] = fields.get("max_tokens") or limit or DEFAULT_MAX_TOKENS
    stop = fields.pop("stop", None)
    if stop:
        fields["stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
    choice = _tool_choice(fields.pop("tool_choice", None))
    if asked.get("parallel_tool_calls") is False:
        choice = {**(choice or {"type": "auto"}), "disable_parallel_tool_use": True}
    if choice and has_tools:
        fields["tool_choice"] = choice
    return fields


def _tool_choice(choice: Any) -> dict[str, Any] | None:
    if isinstance(choice, str):
        return {"type": "any" if choice == "required" else choice}
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        named = choice.get("function") or choice
        return {"type": "tool", "name": named["name"]}
    return dict(choice) if choice else None


# An answer that comes in


def read_response(raw: Mapping[str, Any], url: str) -> Response:
    """A message of the API as a `Response`."""
    blocks = raw.get("content")
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise InvalidModelResponseError(f"POST {url}: an answer without content blocks: {str(dict(raw))[:300]}")
    texts = [block.get("text") or "" for block in blocks if block.get("type") == "text"]
    thoughts = [dict(block) for block in blocks if block.get("type") in THOUGHTS]
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    reason = FINISH_REASONS.get(raw.get("stop_reason") or "", raw.get("stop_reason"))
    if not texts and not thoughts and not calls and reason != "content_filter":
        raise EmptyModelResponseError(f"POST {url}: no text, no thought and no tool calls in the answer")
    return Response(
        id=raw.get("id") or "",
        created=int(time.time()),
        model=raw.get("model") or "",
        usage=_usage_of_answer(raw.get("usage")),
        message=ResponseMessage(
            content="".join(texts) if texts or not calls else None,
            reasoning_content="\n".join(block.get("thinking") or "" for block in thoughts) or None,
            thinking_blocks=thoughts or None,
            tool_calls=calls or None,
            finish_reason=reason,
            is_truncated=reason == "length",
            tokens=None,
        ),
    )


def _call(block: Mapping[str, Any]) -> ToolCall:
    arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
    return ToolCall(id=block.get("id") or "", name=block.get("name"), arguments=arguments)


def _usage_of_answer(raw: Any) -> Usage | None:
    """Token counts; what was read from and written to the cache is part of the prompt."""
    if not isinstance(raw, Mapping):
        return None
    cached = raw.get("cache_read_input_tokens") or 0
    written = raw.get("cache_creation_input_tokens") or 0
    prompt = (raw.get("input_tokens") or 0) + cached + written
    completion = raw.get("output_tokens") or 0
    details = raw.get("output_tokens_details")
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=cached,
        cache_write_tokens=written,
        reasoning_tokens=(details or {}).get("thinking_tokens") or 0 if isinstance(details, Mapping) else 0,
        total_tokens=prompt + completion,
    )


# A request that comes in


def read_call(body: Mapping[str, Any]) -> ModelCall:
    """The call in a request's body. Raises: InvalidRequest."""
    turns = objects(body.get("messages"), "messages")
    if not turns:
        invalid("messages must not be empty")
    messages: list[Message] = [message for turn in turns for message in _turn(turn)]
    if body.get("system"):
        system = content_of(_blocks(body["system"], "system"))
        messages.insert(0, SystemMessage(content=system))
    sampling = given(body, ("temperature", "top_p", "top_k"))
    if body.get("stop_sequences"):
        sampling["stop"] = body["stop_sequences"]
    return ModelCall(
        messages=messages,
        tools=[tool for raw in objects(body.get("tools"), "tools") if (tool := _tool(raw)) is not None],
        model=model_of(body),
        is_stream=bool(body.get("stream")),
        body=body,
        sampling={**sampling, **max_tokens_of(body, "max_tokens")},
        forwarded=_forwarded(body.get("tool_choice")),
    )


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


# An answer that goes out


def answer_body(call: ModelCall, response: Response) -> dict[str, Any]:
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


def answer_events(call: ModelCall, answer: Mapping[str, Any]) -> Iterator[WireEvent]:
    """The message block by block."""
    usage = answer["usage"]
    started = {**answer, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    yield WireEvent({"type": "message_start", "message": started}, "message_start")
    for index, block in enumerate(answer["content"]):
        empty, deltas = _block_deltas(block)
        yield _event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ended = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", delta=ended, usage=usage)
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> WireEvent:
    return WireEvent({"type": kind, **fields}, kind)


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


def error_body(error: WireError) -> dict[str, Any]:
    """Anthropic's error body."""
    return {"type": "error", "error": {"type": error.kind, "message": error.message}, "request_id": None}


def error_event(error: WireError) -> WireEvent:
    """An error once a stream has begun."""
    return WireEvent(error_body(error), "error")
