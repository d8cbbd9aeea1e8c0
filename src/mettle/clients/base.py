"""What a client is: one model call in, one `Response` out.

Parts: `Client`. Ours answer `get_response` themselves. Authors' may instead say how a call looks to their endpoint, in
the steps that verifiers named: `to_native_prompt`, `to_native_tool`, `get_native_response`,
`raise_from_native_response`, `from_native_response`. Invariant: a call returns a `Response` or raises a `RolloutError`;
there is no third outcome, and one failed call says nothing about the next.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from mettle.clients.errors import ModelError, one_line
from mettle.errors import RolloutError, UserError
from mettle.records.messages import Messages, Response, Tool

STREAMING = frozenset({"stream", "stream_options"})
"""A client answers with whole responses, so asking the endpoint for a stream would get what nobody reads."""
STEPS = (
    "to_native_prompt",
    "to_native_tool",
    "get_native_response",
    "raise_from_native_response",
    "from_native_response",
)


class Client:
    """Talks to one model endpoint."""

    FORWARDED: ClassVar[frozenset[str]] = frozenset()
    """Fields besides sampling (`tool_choice`, ...) that the endpoint understands, should a caller want to set them."""

    def __init__(self, client_or_config: Any = None) -> None:
        """`client` is what was given, or what `setup_client` makes of a `ClientConfig`."""
        self.logger = logging.getLogger(f"{type(self).__module__}.{type(self).__name__}")
        is_config = hasattr(client_or_config, "api_base_url")
        self._config = client_or_config if is_config else None
        self.client = self.setup_client(client_or_config) if is_config else client_or_config

    def __class_getitem__(cls, _: Any) -> type[Self]:
        """verifiers' client is generic in the endpoint's own types; nothing here asks for them."""
        return cls

    async def get_response(
        self,
        prompt: Messages,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        tools: list[Tool] | None = None,
        **kwargs: Any,
    ) -> Response:
        """The model's answer to `prompt`. `state=` may carry the rollout, whose earlier turns a client may extend."""
        try:
            native_prompt, more = await self.to_native_prompt(prompt)
            native_tools = [await self.to_native_tool(tool) for tool in tools] if tools else None
            given = {**kwargs, **more}
            parameters = inspect.signature(self.get_native_response).parameters
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                given = {name: value for name, value in given.items() if name in parameters}
            raw = await self.get_native_response(native_prompt, model, dict(sampling_args or {}), native_tools, **given)
            await self.raise_from_native_response(raw)
            return await self.from_native_response(raw)
        except (RolloutError, UserError):
            raise
        except Exception as error:
            raise ModelError(one_line(f"{type(self).__name__}: {type(error).__name__}: {error}")) from error

    def setup_client(self, config: Any) -> Any:
        """What requests go through, made from a `ClientConfig`; by default the config."""
        return config

    async def to_native_prompt(self, messages: Messages) -> tuple[Any, dict[str, Any]]:
        """The prompt as the endpoint takes it, and further arguments of the call; by default as it is."""
        return messages, {}

    async def to_native_tool(self, tool: Tool) -> Any:
        """A tool as the endpoint takes it; by default as it is."""
        return tool

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: dict[str, Any], tools: list[Any] | None = None, **kwargs: Any
    ) -> Any:
        """The endpoint's answer."""
        raise UserError(f"{type(self).__name__} is no client: it has neither get_response nor get_native_response")

    async def raise_from_native_response(self, response: Any) -> None:
        """Raise what is wrong with the endpoint's answer."""

    async def from_native_response(self, response: Any) -> Response:
        """The endpoint's answer as a `Response`; by default it is one already."""
        answer: Response = response
        return answer

    async def close(self) -> None:
        """Let go of connections. A closed client may be used again."""
        return


def request_fields(sampling_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Sampling arguments as fields of a request: None left out, `extra_body` laid over the rest, never as a stream."""
    fields = {key: value for key, value in (sampling_args or {}).items() if value is not None and key not in STREAMING}
    extra = fields.pop("extra_body", None)
    fields.update(extra or {})
    return fields
