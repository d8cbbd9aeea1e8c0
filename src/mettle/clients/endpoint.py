"""Where an OpenAI-shaped request goes: over our own transport, or through an SDK object that somebody made.

Parts: `ModelEndpoint`, `headers_of`. A plain `AsyncOpenAI` is taken over: our transport sends what it would send
(`sdk_objects`). Invariant: an answer is a mapping; whatever else happens is a `RolloutError` that names the URL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from operator import attrgetter
from typing import Any
from urllib.parse import quote

from mettle.clients.base import STREAMING, request_fields
from mettle.clients.config import ClientConfig, transport_for
from mettle.clients.errors import InvalidModelResponseError, ModelError, one_line, refusal_of
from mettle.clients.sdk_objects import is_plain, sdk_of, settings_of, transport_of
from mettle.clients.wire import well_formed

PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))
"""What a header may hold. Anything else of a state's value, line breaks above all, is sent percent-encoded."""

CALL_OPTIONS = frozenset({"extra_headers", "extra_query", "timeout"})
"""Arguments of an SDK's `create` that are about one call, and no fields of its request."""
_NAMED = frozenset({"model", "messages", "prompt", "input", *CALL_OPTIONS})


class ModelEndpoint:
    """An endpoint given as a base URL, a `ClientConfig`, or an `AsyncOpenAI` object."""

    def __init__(self, source: ClientConfig | str | Any) -> None:
        self.source = source
        self.transport = transport_for(source) if isinstance(source, str | ClientConfig) else None
        self._headers_from_state = source.extra_headers_from_state if isinstance(source, ClientConfig) else {}
        self._sdk = None if self.transport is not None else source
        self._taken: tuple[Any, ...] | None = None
        if self.transport is None and is_plain(source):
            self.transport, self._taken = transport_of(source), settings_of(source)
        if self.transport is not None:
            self.base_url = self.transport.base_url
        else:
            self.base_url = str(getattr(source, "base_url", type(source).__name__)).rstrip("/")

    def sdk(self) -> Any:
        """The SDK's object that was given, or an `AsyncOpenAI` for this endpoint."""
        return self._sdk if self.transport is None or self._sdk is not None else sdk_of(self.transport)

    @property
    def is_blocking(self) -> bool:
        """True for an SDK object without `async` (`OpenAI`), which is called in a thread."""
        return any(kind.__name__ == "SyncAPIClient" for kind in type(self._sdk).__mro__)

    def fields(self, sampling_args: Mapping[str, Any] | None) -> dict[str, Any]:
        """Sampling arguments as the endpoint takes them; an SDK lays out `extra_body` itself."""
        if self.transport is not None:
            return request_fields(sampling_args)
        return {
            key: value for key, value in (sampling_args or {}).items() if value is not None and key not in STREAMING
        }

    async def post(
        self, path: str, body: Mapping[str, Any], state: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """The answer to `body`; an SDK has a resource of the same name for each path.

        `state` is the rollout's, for the headers that are taken from it.
        """
        if self.transport is None:
            return await self._created(path, body)
        if self._taken is not None:
            if not CALL_OPTIONS.isdisjoint(body):
                extra = {key: value for key, value in body.items() if key not in _NAMED}
                named = {key: value for key, value in body.items() if key in _NAMED}
                return await self._created(path, {**named, "extra_body": extra})
            self._keep_up()
        if self._headers_from_state and state is not None:
            return await self.transport.post(path, body, headers_of(state, self._headers_from_state))
        return await self.transport.post(path, body)

    def _keep_up(self) -> None:
        """Follow an object that was taken over, should its key, URL or another setting have changed."""
        if (settings := settings_of(self._sdk)) != self._taken:
            self.transport, self._taken = transport_of(self._sdk), settings
            self.base_url = self.transport.base_url

    async def _created(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer by way of the SDK."""
        try:
            resource = attrgetter(path.strip("/").replace("/", "."))(self._sdk)
            answer = await (asyncio.to_thread(resource.create, **body) if self.is_blocking else resource.create(**body))
        except Exception as error:
            raise _sdk_error(error, self.base_url) from error
        return _plain(answer, self.base_url)

    async def close(self) -> None:
        """Close our own connections; an object that somebody else made is theirs to close."""
        if self.transport is not None:
            await self.transport.close()


def headers_of(state: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, str]:
    """Headers by the names in `keys`, whose values are what `state` has under its keys; what it lacks is left out."""
    values = {name: state.get(key) for name, key in keys.items()}
    return {name: quote(str(value), safe=PRINTABLE) for name, value in values.items() if value is not None}


def _sdk_error(error: Exception, base_url: str) -> Exception:
    """A failure of somebody's `AsyncOpenAI` as one of ours."""
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return refusal_of(f"POST {base_url}", status, one_line(str(error)), str(error))
    return ModelError(one_line(f"POST {base_url}: {type(error).__name__}: {error}"))


def _plain(answer: Any, base_url: str) -> Mapping[str, Any]:
    """An SDK's answer as a mapping."""
    if isinstance(answer, Mapping):
        return answer
    if hasattr(answer, "model_dump"):
        dumped: Mapping[str, Any] = well_formed(answer.model_dump())
        return dumped
    raise InvalidModelResponseError(f"POST {base_url}: an answer of type {type(answer).__name__}, no completion")
