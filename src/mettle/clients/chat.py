"""OpenAI chat completions, over our own transport or through an `AsyncOpenAI` object that somebody made.

Parts: `OpenAIChatCompletionsClient`; `wire_message` and `wire_tool` (our messages as the API wants them);
`response_from_chat` (its answer as a `Response`). Invariant: an answer without a choice, or without text, reasoning and
tool calls, is an error and never an empty message; an empty text that the model did say is a message.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mettle.clients.base import Client, request_fields
from mettle.clients.errors import EmptyModelResponseError, InvalidModelResponseError, ModelError, OverlongPromptError
from mettle.clients.errors import is_overlong as body_is_overlong
from mettle.records.messages import Message, Messages, Response, ResponseMessage, ResponseTokens, Tool, Usage
from mettle.records.messages import tool_call_from as flat_tool_call

if TYPE_CHECKING:
    from mettle.clients.config import ClientConfig


class OpenAIChatCompletionsClient(Client):
    """Chat completions of an endpoint given as a base URL, a `ClientConfig`, or an `AsyncOpenAI` object."""

    PATH = "/chat/completions"

    def __init__(self, client_or_config: ClientConfig | str | Any) -> None:
        from mettle.clients.config import ClientConfig, transport_for

        self.transport = None
        self.sdk = None
        if isinstance(client_or_config, str | ClientConfig):
            self.transport = transport_for(client_or_config)
            self.base_url = self.transport.base_url
        else:
            self.sdk = client_or_config
            self.base_url = str(getattr(client_or_config, "base_url", type(client_or_config).__name__)).rstrip("/")

    async def get_response(
        self,
        prompt: Messages,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        tools: list[Tool] | None = None,
        **_: Any,
    ) -> Response:
        """One chat completion."""
        body: dict[str, Any] = {"model": model, "messages": [wire_message(message) for message in prompt]}
        if tools:
            body["tools"] = [wire_tool(tool) for tool in tools]
        if self.transport is not None:
            body.update(request_fields(sampling_args))
            if "api.openai.com" in self.base_url and "max_tokens" in body:
                body.setdefault("max_completion_tokens", body.pop("max_tokens"))
            raw: Mapping[str, Any] = await self.transport.post(self.PATH, body)
        else:
            fields = {key: value for key, value in (sampling_args or {}).items() if value is not None}
            raw = await self._through_sdk({**body, **fields})
        return response_from_chat(raw, self.base_url + self.PATH)

    async def close(self) -> None:
        """Close our own connections; an object that somebody else made is theirs to close."""
        if self.transport is not None:
            await self.transport.close()

    async def _through_sdk(self, fields: dict[str, Any]) -> Mapping[str, Any]:
        assert self.sdk is not None, "without a transport there is an object to call"
        try:
            answer = await self.sdk.chat.completions.create(**fields)
        except Exception as error:
            raise sdk_error(error, self.base_url) from error
        return plain_answer(answer, self.base_url)


def sdk_error(error: Exception, base_url: str) -> Exception:
    """A failure of somebody's `AsyncOpenAI` as one of ours."""
    status = getattr(error, "status_code", None)
    message = (
        f"POST {base_url}: status {status}: {error}" if status else f"POST {base_url}: {type(error).__name__}: {error}"
    )
    if status in (400, 413, 422) and body_is_overlong(str(error)):
        return OverlongPromptError(message)
    return ModelError(message)


def plain_answer(answer: Any, base_url: str) -> Mapping[str, Any]:
    """An SDK's answer as a mapping."""
    if isinstance(answer, Mapping):
        return answer
    if hasattr(answer, "model_dump"):
        dumped: Mapping[str, Any] = answer.model_dump()
        return dumped
    raise InvalidModelResponseError(f"{base_url}: an answer of type {type(answer).__name__}, no completion")


def wire_message(message: Message) -> dict[str, Any]:
    """A message as chat completions wants it: tool calls nested, fields without a value left out."""
    wired = {key: value for key, value in message.items() if value is not None and key != "thinking_blocks"}
    if wired.get("role") == "text":
        wired["role"] = "user"
    if message.get("tool_calls"):
        wired["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in message["tool_calls"]
        ]
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


def response_from_chat(raw: Mapping[str, Any], url: str) -> Response:
    """A chat completion as a `Response`; reads the sampled ids where the endpoint returned them."""
    choices = raw.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        excerpt = json.dumps(raw, default=str)[:300]
        raise InvalidModelResponseError(f"POST {url}: an answer without choices: {excerpt}")
    choice = choices[0]
    said = choice.get("message")
    if not isinstance(said, Mapping):
        raise InvalidModelResponseError(f"POST {url}: a choice without a message: {str(choice)[:300]}")
    reasoning = said.get("reasoning_content") or said.get("reasoning")
    tool_calls = said.get("tool_calls")
    if said.get("content") is None and not reasoning and not tool_calls:
        raise EmptyModelResponseError(f"POST {url}: no text, no reasoning and no tool calls in the answer")
    return Response(
        id=raw.get("id") or "",
        created=raw.get("created") or int(time.time()),
        model=raw.get("model") or "",
        usage=usage_from(raw.get("usage")),
        message=ResponseMessage(
            content=said.get("content"),
            reasoning_content=reasoning,
            tool_calls=[flat_tool_call(call) for call in tool_calls] if tool_calls else None,
            finish_reason=choice.get("finish_reason"),
            is_truncated=choice.get("finish_reason") == "length",
            tokens=tokens_from(raw, choice),
        ),
    )


def usage_from(raw: Any) -> Usage | None:
    """The provider's token counts, flat; None when it gives none."""
    if not isinstance(raw, Mapping):
        return None
    prompt, completion = raw.get("prompt_tokens") or 0, raw.get("completion_tokens") or 0
    prompt_details, completion_details = raw.get("prompt_tokens_details"), raw.get("completion_tokens_details")
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=(prompt_details or {}).get("cached_tokens") or 0,
        reasoning_tokens=(completion_details or {}).get("reasoning_tokens") or 0,
        total_tokens=raw.get("total_tokens") or prompt + completion,
    )


def tokens_from(raw: Mapping[str, Any], choice: Mapping[str, Any]) -> ResponseTokens | None:
    """The sampled ids of a choice, when the endpoint returned prompt ids, ids and their logprobs."""
    prompt_ids = raw.get("prompt_token_ids") or choice.get("prompt_token_ids")
    token_ids = choice.get("token_ids")
    logprobs = choice.get("logprobs")
    if prompt_ids is None or token_ids is None or not isinstance(logprobs, Mapping):
        return None
    entries = logprobs.get("content")
    values = [entry["logprob"] for entry in entries] if entries else logprobs.get("token_logprobs") or []
    if len(values) != len(token_ids):
        return None
    return ResponseTokens(prompt_ids, token_ids, values, choice.get("versions") or ())
