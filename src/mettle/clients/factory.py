"""The client for whatever a caller gives as an endpoint: `client_from`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mettle.clients.anthropic_messages import AnthropicMessagesClient
from mettle.clients.base import Client
from mettle.clients.chat import OpenAIChatCompletionsClient
from mettle.clients.completions import OpenAICompletionsClient
from mettle.clients.config import ClientConfig
from mettle.clients.responses import OpenAIResponsesClient
from mettle.errors import UserError

CLIENTS: dict[str, Callable[[Any], Client]] = {
    "openai_chat_completions": OpenAIChatCompletionsClient,
    "openai_completions": OpenAICompletionsClient,
    "openai_responses": OpenAIResponsesClient,
    "anthropic_messages": AnthropicMessagesClient,
}


def client_from(source: Any) -> Client:
    """A client from a client, a `ClientConfig`, a base URL, or an `AsyncOpenAI` or `AsyncAnthropic` object."""
    if isinstance(source, Client):
        return source
    if isinstance(source, ClientConfig):
        if source.client_type not in CLIENTS:
            raise UserError(f"unknown client type {source.client_type!r}; known are {', '.join(CLIENTS)}")
        return CLIENTS[source.client_type](source)
    if isinstance(source, str) or hasattr(source, "chat"):
        return OpenAIChatCompletionsClient(source)
    if hasattr(source, "get_response"):
        return _duck_typed(source)
    if hasattr(source, "messages"):
        return AnthropicMessagesClient(source)
    raise UserError(
        f"cannot talk to a model through {type(source).__name__}; "
        "give a base URL, a ClientConfig, a Client, an AsyncOpenAI or an AsyncAnthropic"
    )


def _duck_typed(source: Any) -> Client:
    client: Client = source
    return client
