"""The clients of endpoints, one for each dialect.

Parts: `EndpointClient` (what they share), `OpenAIChatCompletionsClient`, `OpenAICompletionsClient`,
`OpenAIResponsesClient`, `AnthropicMessagesClient`. Each is made from a base URL, a `ClientConfig`, or an object of the
openai or anthropic package. Invariant: what a dialect is stands in its module under `dialects`, and nothing of it here.
"""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar
from urllib.parse import urlsplit

from mettle.clients.base import STEPS, Client, request_fields
from mettle.clients.config import ClientConfig
from mettle.clients.dialects import chat, completions, messages, responses
from mettle.clients.dialects.call import readable
from mettle.clients.endpoint import ModelEndpoint
from mettle.clients.transport import LOOPBACK_HOSTS
from mettle.errors import UserError
from mettle.records.messages import Messages, Response, Tool
from mettle.records.record import view_of

ANTHROPIC_URL = "https://api.anthropic.com/v1"
ANTHROPIC_VERSION = "2023-06-01"


class EndpointClient(Client):
    """One request and one answer, in a dialect.

    A class of an author's that overrides a step between the two (`to_native_prompt`, ...) has its calls made in steps.
    """

    PATH: ClassVar[str]
    PROMPT: ClassVar[str] = "messages"
    """The field of a request that holds the prompt."""
    _is_in_steps: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__module__.startswith("mettle.clients."):
            cls._is_in_steps = cls._is_in_steps or any(step in vars(cls) for step in STEPS)

    def __init__(self, client_or_config: ClientConfig | str | Any) -> None:
        self.endpoint = ModelEndpoint(client_or_config)
        self.base_url = self.endpoint.base_url
        self.logger = logging.getLogger(f"{type(self).__module__}.{type(self).__name__}")

    @cached_property
    def client(self) -> Any:
        """The SDK's object for this endpoint: the one that was given, or one that is made when it is asked for."""
        return self.endpoint.sdk()

    async def get_response(
        self,
        prompt: Messages,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        tools: list[Tool] | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Response:
        """One model call."""
        if self._is_in_steps:
            return await super().get_response(prompt, model, sampling_args, tools, state=state, **kwargs)
        raw = await self.endpoint.post(self.PATH, self.request_body(prompt, model, sampling_args, tools), state)
        return readable(self.read_response, raw, self.base_url + self.PATH)

    async def to_native_prompt(self, messages: Messages) -> tuple[Any, dict[str, Any]]:
        """The prompt as it stands in a request, and what else of the request comes from it."""
        body = self.request_body(messages, "", None, None)
        bare = self.request_body([], "", None, None)
        return body[self.PROMPT], {name: value for name, value in body.items() if name not in bare}

    async def to_native_tool(self, tool: Tool) -> Any:
        """A tool as it stands in a request."""
        return self.request_body([], "", None, [tool])["tools"][0]

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: dict[str, Any], tools: list[Any] | None = None, **kwargs: Any
    ) -> Any:
        """The answer as JSON, whose keys are attributes too; keywords other than `state` are fields of the request."""
        state = kwargs.pop("state", None)
        body = {**self.request_body([], model, sampling_args, None), self.PROMPT: prompt, **kwargs}
        return view_of(await self.endpoint.post(self.PATH, {**body, "tools": tools} if tools else body, state))

    async def from_native_response(self, response: Any) -> Response:
        """An answer, as JSON or as an SDK's object, as a `Response`."""
        raw = response if isinstance(response, Mapping) else response.model_dump()
        return readable(self.read_response, raw, self.base_url + self.PATH)

    @abstractmethod
    def request_body(
        self, prompt: Messages, model: str, sampling_args: Mapping[str, Any] | None, tools: list[Tool] | None
    ) -> dict[str, Any]:
        """The call as JSON, or as the arguments of an SDK's `create`."""

    @abstractmethod
    def read_response(self, raw: Mapping[str, Any], url: str) -> Response:
        """The answer of `url` as a `Response`."""

    async def close(self) -> None:
        """Close our own connections."""
        await self.endpoint.close()


class OpenAIChatCompletionsClient(EndpointClient):
    """Chat completions."""

    PATH = "/chat/completions"
    FORWARDED: ClassVar[frozenset[str]] = frozenset({"tool_choice", "parallel_tool_calls", "response_format"})

    def request_body(
        self, prompt: Messages, model: str, sampling_args: Mapping[str, Any] | None, tools: list[Tool] | None
    ) -> dict[str, Any]:
        body = chat.request_body(model, prompt, tools, self.endpoint.fields(sampling_args))
        is_ours = self.endpoint.transport is not None
        if is_ours and "api.openai.com" in self.base_url and "max_tokens" in body:
            body.setdefault("max_completion_tokens", body.pop("max_tokens"))
        return body

    def read_response(self, raw: Mapping[str, Any], url: str) -> Response:
        return chat.read_response(raw, url)


class OpenAICompletionsClient(EndpointClient):
    """Text completions of the contents of a prompt."""

    PATH = "/completions"
    PROMPT = "prompt"

    def request_body(
        self, prompt: Messages, model: str, sampling_args: Mapping[str, Any] | None, tools: list[Tool] | None
    ) -> dict[str, Any]:
        return completions.request_body(model, prompt, tools, self.endpoint.fields(sampling_args))

    def read_response(self, raw: Mapping[str, Any], url: str) -> Response:
        return completions.read_response(raw, url)


class OpenAIResponsesClient(EndpointClient):
    """Responses."""

    PATH = "/responses"
    PROMPT = "input"
    FORWARDED: ClassVar[frozenset[str]] = frozenset({"tool_choice", "parallel_tool_calls", "response_format"})

    def request_body(
        self, prompt: Messages, model: str, sampling_args: Mapping[str, Any] | None, tools: list[Tool] | None
    ) -> dict[str, Any]:
        body = responses.request_body(model, prompt, tools, request_fields(sampling_args))
        return body if self.endpoint.transport is not None else _for_sdk(body, ("model", "input", "tools"))

    def read_response(self, raw: Mapping[str, Any], url: str) -> Response:
        return responses.read_response(raw, url)


class AnthropicMessagesClient(EndpointClient):
    """Anthropic's messages; the base URL may leave out `/v1`."""

    PATH = "/messages"
    FORWARDED: ClassVar[frozenset[str]] = frozenset({"tool_choice", "parallel_tool_calls"})

    def __init__(self, client_or_config: ClientConfig | str | Any) -> None:
        is_ours = isinstance(client_or_config, str | ClientConfig)
        super().__init__(_with_anthropic_headers(client_or_config) if is_ours else client_or_config)
        if is_ours:
            self.endpoint.source = client_or_config  # as it was given: the one with headers has the key in it

    def request_body(
        self, prompt: Messages, model: str, sampling_args: Mapping[str, Any] | None, tools: list[Tool] | None
    ) -> dict[str, Any]:
        body = messages.request_body(model, prompt, tools, request_fields(sampling_args))
        named = ("model", "messages", "system", "tools", "max_tokens")
        return body if self.endpoint.transport is not None else _for_sdk(body, named)

    def read_response(self, raw: Mapping[str, Any], url: str) -> Response:
        return messages.read_response(raw, url)


def _for_sdk(body: dict[str, Any], named: tuple[str, ...]) -> dict[str, Any]:
    """An SDK names the arguments that its version knows and takes the rest as `extra_body`."""
    extra = {key: value for key, value in body.items() if key not in named}
    return {**{key: value for key, value in body.items() if key in named}, "extra_body": extra}


def _with_anthropic_headers(source: ClientConfig | str) -> ClientConfig:
    """The endpoint with Anthropic's own headers; its key is not sent as a bearer token."""
    config = ClientConfig(api_base_url=source) if isinstance(source, str) else source
    url = ANTHROPIC_URL if config.api_base_url == ClientConfig.api_base_url else config.api_base_url.rstrip("/")
    host = urlsplit(url).hostname or ""
    key_var = config.api_key_var or ("ANTHROPIC_API_KEY" if host == "api.anthropic.com" else None)
    key = os.environ.get(key_var) if key_var else None
    if key_var and key is None and host not in LOOPBACK_HOSTS:
        raise UserError(f"{url} wants a key; set the environment variable {key_var}")
    headers = {"anthropic-version": ANTHROPIC_VERSION, **({"x-api-key": key} if key else {}), **config.extra_headers}
    base_url = url if url.endswith("/v1") else f"{url}/v1"
    return replace(config, api_base_url=base_url, api_key_var=None, extra_headers=headers)
