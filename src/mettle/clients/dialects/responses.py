"""OpenAI's Responses API (`POST /responses`), both directions; see the package for the names.

A thought, a text and the tool calls that follow each other are one turn of the assistant. When there is a thought among
the items of an answer that comes in, they are all kept in the message's `thinking_blocks` and go back as they came,
because a thought is only accepted together with what followed it. Tools that take free text ("custom") are offered as
functions with one argument, and their calls go out as the caller expects them. Invariant: an answer that failed, or
without text, thought and tool calls, is an error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mettle.clients.dialects.call import (
    COMMENT,
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
    openai_error,
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

NAME = "responses"
HEARTBEAT = COMMENT
FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
ECHOED = ("instructions", "metadata", "previous_response_id", "reasoning", "temperature", "text", "tools", "top_p")
UNKNOWN_FIELDS = frozenset(
    {"n", "seed", "logprobs", "presence_penalty", "frequency_penalty", "logit_bias", "return_token_ids", "modalities"}
    | {"stream"}
)


# A request that goes out


def request_body(
    model: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """A call as JSON; `fields` are sampling arguments in the words of chat completions."""
    body: dict[str, Any] = {"model": model, "input": wire_items(messages)}
    if tools:
        body["tools"] = [wire_tool(tool) for tool in tools]
    return {**body, **wire_fields(fields)}


def wire_items(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A conversation as input items."""
    return [item for message in messages for item in _items(message)]


def _items(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        return _assistant_items(message)
    if role == "tool":
        said = content if isinstance(content, str) else [_input_part(part) for part in content or ()]
        return [{"type": "function_call_output", "call_id": message.get("tool_call_id") or "", "output": said}]
    said = content if isinstance(content, str) else [_input_part(part) for part in content or ()]
    return [{"type": "message", "role": "user" if role == "text" else role, "content": said}]


def _assistant_items(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    kept = [block for block in message.get("thinking_blocks") or () if block.get("type") in _OUTPUT_ITEMS]
    if kept and _says(kept) == _said(message):
        return [dict(item) for item in kept]
    items: list[dict[str, Any]] = []
    text = content_text(message.get("content"))
    if text:
        items.append({"type": "message", "role": "assistant", "content": text})
    for call in message.get("tool_calls") or ():
        fields = {"call_id": call["id"], "name": call["name"], "arguments": call["arguments"]}
        items.append({"type": "function_call", **fields})
    return items


_OUTPUT_ITEMS = ("reasoning", "message", "function_call")


def _input_part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    kind = part.get("type")
    if kind == "text":
        return {"type": "input_text", "text": part.get("text") or ""}
    if kind == "image_url":
        image = part.get("image_url")
        url, detail = (image["url"], image.get("detail")) if isinstance(image, Mapping) else (image, None)
        return {"type": "input_image", "image_url": url, "detail": detail or "auto"}
    if isinstance(kind, str) and kind.startswith("input_") and kind != "input_audio":
        return dict(part)
    raise ModelError(f"the Responses API takes text and images, and a message has a part of type {kind!r}")


def wire_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function as the Responses API wants it. `strict` must be said, because there it is on unless turned off."""
    source = function_of(tool)
    return {
        "type": "function",
        "name": source["name"],
        "description": source.get("description"),
        "parameters": source.get("parameters") or {"type": "object", "properties": {}},
        "strict": bool(source.get("strict")),
    }


def wire_fields(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling arguments in this API's words. Raises: ModelError for one that it cannot honour."""
    if (asked.get("n") or 1) != 1:
        raise ModelError(f"the Responses API samples one answer a request, not n={asked['n']}")
    if asked.get("stop"):
        raise ModelError(f"the Responses API knows no stop sequences, and {asked['stop']!r} is asked for")
    fields = {key: value for key, value in asked.items() if key not in UNKNOWN_FIELDS and key != "stop"}
    limits = [fields.pop(key, None) for key in ("max_output_tokens", "max_tokens", "max_completion_tokens")]
    limit = next((limit for limit in limits if limit is not None), None)
    if limit is not None:
        fields["max_output_tokens"] = limit
    effort = fields.pop("reasoning_effort", None)
    if effort is not None:
        fields["reasoning"] = {**(fields.get("reasoning") or {}), "effort": effort}
    choice = fields.get("tool_choice")
    if isinstance(choice, Mapping) and isinstance(choice.get("function"), Mapping):
        fields["tool_choice"] = {"type": "function", "name": choice["function"]["name"]}
    form = fields.pop("response_format", None)
    if form is not None:
        schema = form.get("json_schema") if form.get("type") == "json_schema" else None
        fields["text"] = {"format": {"type": form.get("type"), **(schema or {})}}
    return fields


# An answer that comes in


def read_response(raw: Mapping[str, Any], url: str) -> Response:
    """An answer of the API as a `Response`."""
    if raw.get("status") in ("failed", "cancelled"):
        error = raw.get("error")
        reason = error.get("message") if isinstance(error, Mapping) else error
        raise ModelError(f"POST {url}: the response {raw['status']}: {reason}")
    items = raw.get("output")
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise InvalidModelResponseError(f"POST {url}: an answer without output items: {str(dict(raw))[:300]}")
    thoughts = [_thought(item) for item in items if item.get("type") == "reasoning"]
    text, calls = _says(items)
    if text is None and not any(thoughts) and not calls:
        raise EmptyModelResponseError(f"POST {url}: no text, no thought and no tool calls in the answer")
    kept = [_without_nones(item) for item in items if item.get("type") in _OUTPUT_ITEMS] if thoughts else None
    reason = _finish_reason(raw, bool(calls))
    return Response(
        id=raw.get("id") or "",
        created=int(raw.get("created_at") or time.time()),
        model=raw.get("model") or "",
        usage=_usage_of_answer(raw.get("usage")),
        message=ResponseMessage(
            content=text,
            reasoning_content="\n".join(thought for thought in thoughts if thought) or None,
            thinking_blocks=kept,
            tool_calls=[ToolCall(id=i, name=name, arguments=arguments) for i, name, arguments in calls] or None,
            finish_reason=reason,
            is_truncated=reason == "length",
            tokens=None,
        ),
    )


Said = tuple[str | None, list[tuple[str, str, str]]]


def _says(items: Sequence[Mapping[str, Any]]) -> Said:
    """The text and the calls of output items."""
    texts = [
        part.get("text") or part.get("refusal") or ""
        for item in items
        if item.get("type") == "message"
        for part in item.get("content") or ()
        if isinstance(part, Mapping)
    ]
    calls = [item for item in items if item.get("type") == "function_call"]
    triples = [(c.get("call_id") or c.get("id") or "", c.get("name") or "", c.get("arguments") or "{}") for c in calls]
    return ("".join(texts) if texts else None), triples


def _said(message: Mapping[str, Any]) -> Said:
    calls = [(call["id"], call["name"], call["arguments"]) for call in message.get("tool_calls") or ()]
    content = message.get("content")
    return (content if content is None else content_text(content)), calls


def _thought(item: Mapping[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or ()
    return "\n".join(part.get("text") or "" for part in parts if isinstance(part, Mapping))


def _without_nones(item: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if value is not None}


def _finish_reason(raw: Mapping[str, Any], has_calls: bool) -> str:
    details = raw.get("incomplete_details")
    if raw.get("status") == "incomplete":
        why = details.get("reason") if isinstance(details, Mapping) else None
        return "content_filter" if why == "content_filter" else "length"
    return "tool_calls" if has_calls else "stop"


def _usage_of_answer(raw: Any) -> Usage | None:
    if not isinstance(raw, Mapping):
        return None
    prompt, completion = raw.get("input_tokens") or 0, raw.get("output_tokens") or 0
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=(raw.get("input_tokens_details") or {}).get("cached_tokens") or 0,
        reasoning_tokens=(raw.get("output_tokens_details") or {}).get("reasoning_tokens") or 0,
        total_tokens=raw.get("total_tokens") or prompt + completion,
    )


# A request that comes in


def read_call(body: Mapping[str, Any]) -> ModelCall:
    """The call in a request's body. Raises: InvalidRequest."""
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    messages = _messages(objects(items, "input"))
    if not messages:
        invalid("input must not be empty")
    if body.get("instructions"):
        messages.insert(0, SystemMessage(content=text_of(body["instructions"], "instructions")))
    previous = text_of(body.get("previous_response_id"), "previous_response_id")
    return ModelCall(
        messages=messages,
        tools=[tool for raw in objects(body.get("tools"), "tools") if (tool := _tool(raw)) is not None],
        model=model_of(body),
        is_stream=bool(body.get("stream")),
        body=body,
        sampling={**given(body, ("temperature", "top_p")), **max_tokens_of(body, "max_output_tokens")},
        forwarded=_forwarded(body),
        previous_response_id=previous or None,
    )


def _messages(items: list[Mapping[str, Any]]) -> list[Message]:
    """Input items as messages; the items of one assistant's turn become one message."""
    messages: list[Message] = []
    turn: AssistantMessage | None = None
    for item in items:
        kind = item.get("type", "message")
        is_assistants = kind in ("reasoning", "function_call", "custom_tool_call") or item.get("role") == "assistant"
        if not is_assistants:
            turn = None
            messages.append(_message(kind, item))
            continue
        if turn is None or (kind == "reasoning" and (turn["content"] or turn.get("tool_calls"))):
            turn = AssistantMessage(content=None)
            messages.append(turn)
        _add_to_turn(turn, kind, item)
    for message in messages:
        if message["content"] is None and not message.get("tool_calls"):
            message["content"] = ""
    return messages


def _add_to_turn(turn: AssistantMessage, kind: str, item: Mapping[str, Any]) -> None:
    if kind == "reasoning":
        parts = objects(item.get("content"), "reasoning") or objects(item.get("summary"), "reasoning")
        thought = "\n".join(text_of(part.get("text"), "reasoning") for part in parts)
        if thought:
            turn["reasoning_content"] = "\n".join(filter(None, (turn.get("reasoning_content"), thought)))
    elif kind == "message":
        content = item.get("content")
        parts = [{"type": "output_text", "text": content}] if isinstance(content, str) else objects(content, "content")
        said = "".join(text_of(part.get("text") or part.get("refusal"), "text") for part in parts)
        turn["content"] = (turn["content"] or "") + said
    else:
        free = kind == "custom_tool_call"
        arguments: Any = {"input": item.get("input")} if free else item.get("arguments")
        call = tool_call_of(item.get("call_id"), item.get("name"), arguments)
        turn["tool_calls"] = [*(turn.get("tool_calls") or ()), call]


def _message(kind: Any, item: Mapping[str, Any]) -> Message:
    if kind in ("function_call_output", "custom_tool_call_output"):
        said = item.get("output")
        content = said if isinstance(said, str) else content_of(_part(part) for part in objects(said, "output"))
        return ToolMessage(tool_call_id=text_of(item.get("call_id"), "call_id"), content=content)
    if kind != "message":
        invalid(f"an input item of type {kind!r} cannot be shown to this model")
    found = item.get("content")
    content = found if isinstance(found, str) else content_of(_part(part) for part in objects(found, "content"))
    if item.get("role") in ("system", "developer"):
        return SystemMessage(content=content)
    if item.get("role") == "user":
        return UserMessage(content=content)
    invalid(f"a message has the role {item.get('role')!r}")


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": text_of(part.get("text"), "text")}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    invalid(f"content has a part of type {kind!r}")


def _tool(raw: Mapping[str, Any]) -> Tool | None:
    """A tool; one that OpenAI's servers run themselves cannot be offered and is left out."""
    kind = raw.get("type")
    if kind == "function":
        return tool_of(raw.get("name"), raw.get("description"), raw.get("parameters"), raw.get("strict"))
    if kind == "custom":
        return tool_of(raw.get("name"), raw.get("description"), FREE_TEXT)
    return None


def _forwarded(body: Mapping[str, Any]) -> dict[str, Any]:
    forwarded: dict[str, Any] = {}
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        forwarded["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif choice in ("none", "required"):
        forwarded["tool_choice"] = choice
    if body.get("parallel_tool_calls") is False:
        forwarded["parallel_tool_calls"] = False
    text = body.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    if isinstance(form, dict) and form.get("type") == "json_schema":
        schema = {key: form[key] for key in ("name", "schema", "strict", "description") if key in form}
        forwarded["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif isinstance(form, dict) and form.get("type") == "json_object":
        forwarded["response_format"] = {"type": "json_object"}
    return forwarded


# An answer that goes out


def answer_body(call: ModelCall, response: Response) -> dict[str, Any]:
    """A response."""
    reason = response.message.finish_reason
    why = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(reason or "")
    usage = usage_of(response)
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if why else "completed",
        "error": None,
        "incomplete_details": {"reason": why} if why else None,
        "model": call.model,
        "output": _output_items(call, response),
        "parallel_tool_calls": bool(call.body.get("parallel_tool_calls", True)),
        "tool_choice": call.body.get("tool_choice") or "auto",
        "max_output_tokens": call.body.get("max_output_tokens"),
        "store": bool(call.body.get("store", True)),
        **{name: call.body.get(name) for name in ECHOED},
        "tools": call.body.get("tools") or [],
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.total_tokens,
        },
    }


def answer_events(call: ModelCall, answer: Mapping[str, Any]) -> Iterator[WireEvent]:
    """The response item by item; events are numbered."""
    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(answer["output"]):
        events += _item_events(index, item)
    events.append({"type": f"response.{answer['status']}", "response": dict(answer)})
    for number, event in enumerate(events):
        yield WireEvent({**event, "sequence_number": number}, event["type"])


def _output_items(call: ModelCall, response: Response) -> list[dict[str, Any]]:
    said = response.message
    items: list[dict[str, Any]] = []
    if said.reasoning_content:
        summary = [{"type": "summary_text", "text": said.reasoning_content}]
        items.append({"type": "reasoning", "id": new_id("rs_"), "summary": summary})
    if said.content or not said.tool_calls:
        part: dict[str, Any] = {"type": "output_text", "text": said.content or "", "annotations": [], "logprobs": []}
        fields = {"id": new_id("msg_"), "role": "assistant", "status": "completed", "content": [part]}
        items.append({"type": "message", **fields})
    free = {tool.get("name") for tool in call.body.get("tools") or () if tool.get("type") == "custom"}
    for tool_call in said.tool_calls or ():
        items.append(_call_item(tool_call, is_free=tool_call["name"] in free))
    return items


def _call_item(call: Mapping[str, Any], *, is_free: bool) -> dict[str, Any]:
    if is_free:
        text = arguments_object(call["arguments"]).get("input", call["arguments"])
        fields = {"id": new_id("ctc_"), "call_id": call["id"], "name": call["name"], "input": str(text)}
        return {"type": "custom_tool_call", **fields, "status": "completed"}
    fields = {"id": new_id("fc_"), "call_id": call["id"], "name": call["name"], "arguments": call["arguments"]}
    return {"type": "function_call", **fields, "status": "completed"}


def _item_events(index: int, item: Mapping[str, Any]) -> list[dict[str, Any]]:
    at = {"item_id": item["id"], "output_index": index}
    kind = item["type"]
    if kind == "message":
        empty, events = {**item, "content": []}, _text_events(at, item["content"][0])
    elif kind == "reasoning":
        empty, events = {**item, "summary": []}, _thought_events(at, item["summary"][0])
    else:
        field, name = ("arguments", "function_call_arguments")
        if kind == "custom_tool_call":
            field, name = ("input", "custom_tool_call_input")
        empty = {**item, field: ""}
        named = {"name": item["name"]} if kind == "function_call" else {}
        events = [
            {"type": f"response.{name}.delta", **at, "delta": item[field]},
            {"type": f"response.{name}.done", **at, **named, field: item[field]},
        ]
    started = {"type": "response.output_item.added", "output_index": index, "item": {**empty, "status": "in_progress"}}
    if kind == "reasoning":
        started["item"] = empty
    return [started, *events, {"type": "response.output_item.done", "output_index": index, "item": dict(item)}]


def _text_events(at: Mapping[str, Any], part: Mapping[str, Any]) -> list[dict[str, Any]]:
    at = {**at, "content_index": 0}
    text = part["text"]
    events: list[dict[str, Any]] = [{"type": "response.content_part.added", **at, "part": {**part, "text": ""}}]
    if text:
        events.append({"type": "response.output_text.delta", **at, "delta": text, "logprobs": []})
    events.append({"type": "response.output_text.done", **at, "text": text, "logprobs": []})
    return [*events, {"type": "response.content_part.done", **at, "part": dict(part)}]


def _thought_events(at: Mapping[str, Any], part: Mapping[str, Any]) -> list[dict[str, Any]]:
    at = {**at, "summary_index": 0}
    name = "response.reasoning_summary"
    return [
        {"type": f"{name}_part.added", **at, "part": {**part, "text": ""}},
        {"type": f"{name}_text.delta", **at, "delta": part["text"]},
        {"type": f"{name}_text.done", **at, "text": part["text"]},
        {"type": f"{name}_part.done", **at, "part": dict(part)},
    ]


error_body = openai_error


def error_event(error: WireError) -> WireEvent:
    """An error once a stream has begun."""
    fields = {"code": error.code or error.kind, "message": error.message, "param": None}
    return WireEvent({"type": "error", **fields, "sequence_number": 0}, "error")
