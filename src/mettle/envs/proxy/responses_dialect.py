"""OpenAI's Responses API as agents speak it.

Parts: `ResponsesDialect`. Invariant: what `answer` says reads back, by `read`, as the message that the model said: a
thought, a text and the tool calls that follow each other are one turn of the assistant. Tools that take free text
("custom") are offered as functions with one argument, and their calls come back as the agent expects them.
"""

from __future__ import annotations

import time
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

FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
ECHOED = ("instructions", "metadata", "previous_response_id", "reasoning", "temperature", "text", "tools", "top_p")


class ResponsesDialect:
    """`POST /v1/responses`."""

    name = "responses"

    def read(self, body: Mapping[str, Any]) -> AgentCall:
        """The call in a request's body."""
        given = body.get("input")
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        messages = _messages(objects(given, "input"))
        if not messages:
            invalid("input must not be empty")
        if body.get("instructions"):
            messages.insert(0, SystemMessage(content=text_of(body["instructions"], "instructions")))
        sampling = {name: body[name] for name in ("temperature", "top_p") if body.get(name) is not None}
        previous = text_of(body.get("previous_response_id"), "previous_response_id")
        return AgentCall(
            dialect=self,
            messages=messages,
            tools=[tool for raw in objects(body.get("tools"), "tools") if (tool := _tool(raw)) is not None],
            model=model_of(body),
            is_stream=bool(body.get("stream")),
            body=body,
            sampling={**sampling, **max_tokens_of(body, "max_output_tokens")},
            forwarded=_forwarded(body),
            previous_response_id=previous or None,
        )

    def answer(self, call: AgentCall, response: Response) -> dict[str, Any]:
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

    def events(self, call: AgentCall, answer: Mapping[str, Any]) -> Iterator[bytes]:
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
            yield sse({**event, "sequence_number": number}, event["type"])

    def heartbeat(self) -> bytes:
        """A comment, which every reader of events passes over."""
        return b": waiting for the model\n\n"

    def refusal(self, refusal: Refusal) -> dict[str, Any]:
        """OpenAI's error body."""
        error = {"message": refusal.message, "type": refusal.kind, "param": None, "code": refusal.code}
        return {"error": error}

    def refusal_event(self, refusal: Refusal) -> bytes:
        """An error inside a stream."""
        fields = {"code": refusal.code or refusal.kind, "message": refusal.message, "param": None}
        return sse({"type": "error", **fields, "sequence_number": 0}, "error")


# What comes in


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
    given = item.get("content")
    content = given if isinstance(given, str) else content_of(_part(part) for part in objects(given, "content"))
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


# What goes out


def _output_items(call: AgentCall, response: Response) -> list[dict[str, Any]]:
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
