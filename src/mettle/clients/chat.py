"""OpenAI chat completions.

Parts: `OpenAIChatCompletionsClient`; `wire_message` and `wire_tool` (our messages as the API wants them);
`response_from_chat` (its answer as a `Response`). Invariant: an answer without a choice, or without text, reasoning and
tool calls, is an error and never an empty message; an empty text that the model did say is a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mettle.clients.answer import first_choice, read, response_of
from mettle.clients.base import Client
from mettle.clients.config import ClientConfig
from mettle.clients.endpoint import Endpoint
from mettle.clients.errors import EmptyModelResponseError, InvalidModelResponseError
from mettle.records.messages import Message, Messages, Response, Tool
from mettle.records.messages import tool_call_from as flat_tool_call


class OpenAIChatCompletionsClient(Client):
    """Chat completions of an endpoint given as a base URL, a `ClientConfig`, or an `AsyncOpenAI` object."""

    PATH = "/chat/completions"
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
        """One chat completion."""
        body: dict[str, Any] = {"model": model, "messages": [wire_message(message) for message in prompt]}
        if tools:
            body["tools"] = [wire_tool(tool) for tool in tools]
        body.update(self.endpoint.fields(sampling_args))
        is_ours = self.endpoint.transport is not None
        if is_ours and "api.openai.com" in self.base_url and "max_tokens" in body:
            body.setdefault("max_completion_tokens", body.pop("max_tokens"))
        return read(response_from_chat, await self.endpoint.post(self.PATH, body, state), self.base_url + self.PATH)

    async def close(self) -> None:
        """Close our own connections."""
        await self.endpoint.close()


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
    return response_of(raw, choice, content, reasoning, flat_calls)
