"""OpenAI's Responses API.

Parts: `OpenAIResponsesClient`; `wire_items` and `wire_tool` (our messages as input items); `response_from_items` (its
answer as a `Response`). When there is a thought among the answer's items, they are all kept in the message's
`thinking_blocks` and go back as they came, because a thought is only accepted together with what followed it.
Invariant: an answer that failed, or without text, thought and tool calls, is an error.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mettle.clients.base import Client, request_fields
from mettle.clients.config import ClientConfig
from mettle.clients.endpoint import Endpoint
from mettle.clients.errors import EmptyModelResponseError, InvalidModelResponseError, ModelError
from mettle.records.messages import Message, Messages, Response, ResponseMessage, Tool, ToolCall, Usage, content_text

UNKNOWN_FIELDS = frozenset(
    {"n", "seed", "logprobs", "presence_penalty", "frequency_penalty", "logit_bias", "return_token_ids", "modalities"}
    | {"stream"}
)


class OpenAIResponsesClient(Client):
    """Responses of an endpoint given as a base URL, a `ClientConfig`, or an `AsyncOpenAI` object."""

    PATH = "/responses"
    FORWARDED: ClassVar[frozenset[str]] = frozenset({"tool_choice", "parallel_tool_calls", "response_format"})

    def __init__(self, client_or_config: ClientConfig | str | Any) -> None:
        self.endpoint = Endpoint(client_or_config)
        self.base_url = self.endpoint.base_url

    async def get_response(
        self,
        prompt: Messages,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        tools: list[Tool] | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> Response:
        """One response."""
        body: dict[str, Any] = {"model": model, "input": wire_items(prompt)}
        if tools:
            body["tools"] = [wire_tool(tool) for tool in tools]
        fields = _fields(request_fields(sampling_args))
        if self.endpoint.transport is None:  # an SDK names the arguments that its version knows and takes the rest so
            body["extra_body"] = fields
        else:
            body.update(fields)
        return response_from_items(await self.endpoint.post(self.PATH, body, state), self.base_url + self.PATH)

    async def close(self) -> None:
        """Close our own connections."""
        await self.endpoint.close()


# Our messages as input items


def wire_items(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A conversation as input items."""
    return [item for message in messages for item in _items(message)]


def _items(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        return _assistant_items(message)
    if role == "tool":
        said = content if isinstance(content, str) else [_part(part) for part in content or ()]
        return [{"type": "function_call_output", "call_id": message.get("tool_call_id") or "", "output": said}]
    said = content if isinstance(content, str) else [_part(part) for part in content or ()]
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


def _part(part: Any) -> dict[str, Any]:
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
    source: Mapping[str, Any] = tool["function"] if isinstance(tool.get("function"), Mapping) else tool
    return {
        "type": "function",
        "name": source["name"],
        "description": source.get("description"),
        "parameters": source.get("parameters") or {"type": "object", "properties": {}},
        "strict": bool(source.get("strict")),
    }


def _fields(given: dict[str, Any]) -> dict[str, Any]:
    """Sampling arguments in this API's words."""
    if (given.get("n") or 1) != 1:
        raise ModelError(f"the Responses API samples one answer a request, not n={given['n']}")
    if given.get("stop"):
        raise ModelError(f"the Responses API knows no stop sequences, and {given['stop']!r} is asked for")
    fields = {key: value for key, value in given.items() if key not in UNKNOWN_FIELDS and key != "stop"}
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


# Its answer as a `Response`


def response_from_items(raw: Mapping[str, Any], url: str) -> Response:
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
        usage=_usage(raw.get("usage")),
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


def _usage(raw: Any) -> Usage | None:
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
