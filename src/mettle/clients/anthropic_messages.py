"""Anthropic's Messages API.

Parts: `AnthropicMessagesClient`; `wire_conversation` and `wire_tool` (our messages as the API wants them: the system
text apart, what tools said inside the user's turn); `response_from_message` (its answer as a `Response`). Invariant: an
answer without text, thought and tool calls is an error; signed thoughts go back exactly as they came, unsigned ones
(another model's) never, because the API refuses them.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from urllib.parse import urlsplit

from mettle.clients.base import Client, request_fields
from mettle.clients.config import ClientConfig
from mettle.clients.endpoint import Endpoint
from mettle.clients.errors import EmptyModelResponseError, InvalidModelResponseError, ModelError
from mettle.clients.transport import LOOPBACK_HOSTS
from mettle.errors import UserError
from mettle.records.messages import Message, Messages, Response, ResponseMessage, Tool, ToolCall, Usage, content_text

logger = logging.getLogger(__name__)

API_URL = "https://api.anthropic.com/v1"
API_VERSION = "2023-06-01"
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
UNKNOWN_FIELDS = frozenset(
    {"n", "seed", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty", "logit_bias", "return_token_ids"}
    | {"modalities", "stream", "parallel_tool_calls"}
)


class AnthropicMessagesClient(Client):
    """Messages of an endpoint given as a base URL (with or without `/v1`), a `ClientConfig`, or an `AsyncAnthropic`."""

    PATH = "/messages"
    FORWARDED: ClassVar[frozenset[str]] = frozenset({"tool_choice", "parallel_tool_calls"})

    def __init__(self, client_or_config: ClientConfig | str | Any) -> None:
        is_ours = isinstance(client_or_config, str | ClientConfig)
        self.endpoint = Endpoint(_with_headers(client_or_config) if is_ours else client_or_config)
        if is_ours:
            self.endpoint.source = client_or_config  # as it was given: the one with headers has the key in it
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
        """One message."""
        system, messages = wire_conversation(prompt)
        body: dict[str, Any] = {"model": model, "messages": messages}
        if system:
            body["system"] = system
        if tools:
            body["tools"] = [wire_tool(tool) for tool in tools]
        fields = _fields(request_fields(sampling_args), has_tools=bool(tools))
        if self.endpoint.transport is None:  # an SDK names the arguments that its version knows and takes the rest so
            body["max_tokens"] = fields.pop("max_tokens")
            body["extra_body"] = fields
        else:
            body.update(fields)
        return response_from_message(await self.endpoint.post(self.PATH, body, state), self.base_url + self.PATH)

    async def close(self) -> None:
        """Close our own connections."""
        await self.endpoint.close()


def _with_headers(source: ClientConfig | str) -> ClientConfig:
    """The endpoint with Anthropic's own headers; its key is not sent as a bearer token."""
    config = ClientConfig(api_base_url=source) if isinstance(source, str) else source
    url = API_URL if config.api_base_url == ClientConfig.api_base_url else config.api_base_url.rstrip("/")
    host = urlsplit(url).hostname or ""
    key_var = config.api_key_var or ("ANTHROPIC_API_KEY" if host == "api.anthropic.com" else None)
    key = os.environ.get(key_var) if key_var else None
    if key_var and key is None and host not in LOOPBACK_HOSTS:
        raise UserError(f"{url} wants a key; set the environment variable {key_var}")
    headers = {"anthropic-version": API_VERSION, **({"x-api-key": key} if key else {}), **config.extra_headers}
    base_url = url if url.endswith("/v1") else f"{url}/v1"
    return replace(config, api_base_url=base_url, api_key_var=None, extra_headers=headers)


# Our messages as the API wants them


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
            speaker, blocks = "user", [_tool_result(message)]
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
    blocks = (_part(part) for part in content)
    return [block for block in blocks if block.get("text") != ""]


def _part(part: Any) -> dict[str, Any]:
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
    kinds = ("thinking", "redacted_thinking")
    thoughts = [dict(block) for block in message.get("thinking_blocks") or () if block.get("type") in kinds]
    calls = [
        {"type": "tool_use", "id": call["id"], "name": call["name"], "input": _input(call.get("arguments"))}
        for call in message.get("tool_calls") or ()
    ]
    return [*thoughts, *wire_parts(message.get("content")), *calls]


def _input(arguments: Any) -> dict[str, Any]:
    """Arguments as an object, which is all that the API takes; text that is none is passed on under a name."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"invalid_arguments": arguments}


def _tool_result(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    said: Any = content if isinstance(content, str) else wire_parts(content)
    block = {"type": "tool_result", "tool_use_id": message.get("tool_call_id") or "", "content": said}
    return {**block, "is_error": True} if message.get("is_error") else block


def wire_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as the Messages API wants it."""
    source: Mapping[str, Any] = tool["function"] if isinstance(tool.get("function"), Mapping) else tool
    schema = source.get("parameters") or {"type": "object", "properties": {}}
    wired = {"name": source["name"], "input_schema": schema}
    return {**wired, "description": source["description"]} if source.get("description") else wired


def _fields(given: dict[str, Any], *, has_tools: bool) -> dict[str, Any]:
    """Sampling arguments in this API's words."""
    if (given.get("n") or 1) != 1:
        raise ModelError(f"the Messages API samples one answer a request, not n={given['n']}")
    fields = {key: value for key, value in given.items() if key not in UNKNOWN_FIELDS}
    dropped = sorted(set(given) & UNKNOWN_FIELDS - {"n", "stream", "parallel_tool_calls"})
    if dropped:
        logger.debug("the Messages API knows no %s", dropped)
    limit = fields.pop("max_completion_tokens", None)
    fields["max_tokens"] = fields.get("max_tokens") or limit or DEFAULT_MAX_TOKENS
    stop = fields.pop("stop", None)
    if stop:
        fields["stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
    choice = _tool_choice(fields.pop("tool_choice", None))
    if given.get("parallel_tool_calls") is False:
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


# Its answer as a `Response`


def response_from_message(raw: Mapping[str, Any], url: str) -> Response:
    """A message of the API as a `Response`."""
    blocks = raw.get("content")
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise InvalidModelResponseError(f"POST {url}: an answer without content blocks: {str(dict(raw))[:300]}")
    texts = [block.get("text") or "" for block in blocks if block.get("type") == "text"]
    thoughts = [dict(block) for block in blocks if block.get("type") in ("thinking", "redacted_thinking")]
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    reason = FINISH_REASONS.get(raw.get("stop_reason") or "", raw.get("stop_reason"))
    if not texts and not thoughts and not calls and reason != "content_filter":
        raise EmptyModelResponseError(f"POST {url}: no text, no thought and no tool calls in the answer")
    return Response(
        id=raw.get("id") or "",
        created=int(time.time()),
        model=raw.get("model") or "",
        usage=_usage(raw.get("usage")),
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


def _usage(raw: Any) -> Usage | None:
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
