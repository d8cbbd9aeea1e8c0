"""The client for whatever a caller gives as an endpoint: `client_from`."""

from __future__ import annotations

from typing import Any

from mettle.clients.base import Client
from mettle.clients.chat import OpenAIChatCompletionsClient
from mettle.clients.completions import OpenAICompletionsClient
from mettle.clients.config import ClientConfig
from mettle.errors import UserError


def client_from(source: Any) -> Client:
    """A client from a client, a `ClientConfig`, a base URL, or an `AsyncOpenAI` object."""
    if isinstance(source, Client):
        return source
    if isinstance(source, ClientConfig) and source.client_type == "openai_completions":
        return OpenAICompletionsClient(source)
    if isinstance(source, ClientConfig) and source.client_type != "openai_chat_completions":
        known = "openai_chat_completions, openai_completions"
        raise UserError(f"unknown client type {source.client_type!r}; known are {known}")
    if isinstance(source, str | ClientConfig) or hasattr(source, "chat"):
        return OpenAIChatCompletionsClient(source)
    if hasattr(source, "get_response"):
        return _duck_typed(source)
    raise UserError(
        f"cannot talk to a model through {type(source).__name__}; "
        "give a base URL, a ClientConfig, a Client or an AsyncOpenAI"
    )


def _duck_typed(source: Any) -> Client:
    client: Client = source
    return client
