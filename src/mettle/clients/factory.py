"""The client for whatever a caller gives as an endpoint: `client_from`; the kinds of client by name.

Parts: `CLIENT_TYPES`, `SHORT_NAMES`, `client_type_named`, `client_type_of`, `client_from`. Invariant: the class of a
kind is imported when the first client of that kind is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mettle.clients.base import Client
from mettle.clients.config import ClientConfig
from mettle.clients.endpoint_clients import OpenAIChatCompletionsClient
from mettle.errors import UserError

CLIENT_TYPES: Mapping[str, str] = {
    "openai_chat_completions": "mettle.clients.endpoint_clients:OpenAIChatCompletionsClient",
    "openai_completions": "mettle.clients.endpoint_clients:OpenAICompletionsClient",
    "openai_responses": "mettle.clients.endpoint_clients:OpenAIResponsesClient",
    "anthropic_messages": "mettle.clients.endpoint_clients:AnthropicMessagesClient",
    "renderer": "mettle.clients.tokens:TokenClient",
}
SHORT_NAMES: Mapping[str, str] = {
    "chat": "openai_chat_completions",
    "completions": "openai_completions",
    "responses": "openai_responses",
    "anthropic": "anthropic_messages",
    "tokens": "renderer",
    "openai_chat_completions_token": "renderer",
}


def client_type_named(name: str) -> str:
    """The kind of client that a name or a short name means. Raises: UserError naming the nearest one."""
    found = SHORT_NAMES.get(name, name)
    if found in CLIENT_TYPES:
        return found
    import difflib

    known = [*(short for short in SHORT_NAMES if "_" not in short), *CLIENT_TYPES]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    raise UserError(f"unknown client type {name!r}; {hint}")


def client_type_of(client: Any) -> str | None:
    """The kind of a client of ours; None for anything else."""
    name = f"{type(client).__module__}:{type(client).__qualname__}"
    return next((kind for kind, path in CLIENT_TYPES.items() if path == name), None)


def client_from(source: Any) -> Client:
    """A client from a client, a `ClientConfig`, a base URL, or an `AsyncOpenAI` or `AsyncAnthropic` object."""
    if isinstance(source, Client):
        return source
    if isinstance(source, ClientConfig):
        return _from_config(source)
    if isinstance(source, str) or hasattr(source, "chat"):
        return OpenAIChatCompletionsClient(source)
    if hasattr(source, "get_response"):
        return _duck_typed(source)
    if hasattr(source, "messages"):
        return _class_of("anthropic_messages")(source)
    raise UserError(
        f"cannot talk to a model through {type(source).__name__}; "
        "give a base URL, a ClientConfig, a Client, an AsyncOpenAI or an AsyncAnthropic"
    )


def _from_config(config: ClientConfig) -> Client:
    if len(config.endpoint_configs) > 1:
        from mettle.clients.rotation import RotatingClient

        return RotatingClient([(_from_config(one), one.model) for one in config.endpoint_configs], config)
    if config.endpoint_configs:
        return _from_config(config.endpoint_configs[0])
    kind = client_type_named(config.client_type)
    if kind == "renderer":
        return _token_client(config)
    return _class_of(kind)(replace(config, client_type=kind))


def _class_of(kind: str) -> Callable[[Any], Client]:
    module, _, name = CLIENT_TYPES[kind].partition(":")
    made: Callable[[Any], Client] = getattr(importlib.import_module(module), name)
    return made


def _token_client(config: ClientConfig) -> Client:
    if config.extra_headers_from_state:
        raise UserError("client type 'tokens' shares requests among a group's rollouts: it has no headers from state")
    if config.tokenizer is None:
        raise UserError("client type 'tokens' renders prompts itself: it needs a tokenizer (a model directory)")
    from mettle.clients.renderer import Renderer
    from mettle.clients.tokens import TokenClient

    return TokenClient(config, Renderer.from_directory(config.tokenizer))


def _duck_typed(source: Any) -> Client:
    client: Client = source
    return client
