"""An `AsyncOpenAI` or `OpenAI` object that a caller made, taken over: its endpoint, reached over our own transport.

Parts: `is_plain`, `settings_of`, `transport_of`; `sdk_of`, the way back. The SDK takes several times the processor time
of our transport for a request, and where it would send one can be read from the object: base URL, key, organization,
project, headers, timeout and retries. Invariants: an object that does more than that is not plain and is called as it
is (a subclass, an HTTP client or a key provider of one's own, a query, hooks, a method that somebody replaced on it or
in its package); an object has one transport, however often it is given; the package is imported for `sdk_of` only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from mettle.clients.transport import ModelTransport, RetryPolicy
from mettle.errors import UserError

_HTTP_CLIENTS = {"AsyncOpenAI": "AsyncHttpxClientWrapper", "OpenAI": "SyncHttpxClientWrapper"}
"""The classes that are understood, and the HTTP client that each makes where it is given none."""
_OWN_WAYS = ("_provider", "_api_key_provider", "workload_identity", "_workload_identity_auth", "_custom_query")
_CREATE = (
    ("openai.resources.chat.completions", "Completions"),
    ("openai.resources.completions", "Completions"),
    ("openai.resources.responses", "Responses"),
)
_HANDLERS = ("handle_async_request", "handle_request")
_transports: WeakKeyDictionary[Any, tuple[tuple[Any, ...], ModelTransport]] = WeakKeyDictionary()


def is_plain(sdk: Any) -> bool:
    """Whether all that `sdk` would do with a request is known."""
    name = type(sdk).__name__
    if name not in _HTTP_CLIENTS or getattr(sys.modules.get("openai"), name, None) is not type(sdk):
        return False
    http = getattr(sdk, "_client", None)
    if type(http).__name__ != _HTTP_CLIENTS[name] or any(getattr(sdk, way, None) for way in _OWN_WAYS):
        return False
    if getattr(http, "auth", None) is not None or any(getattr(http, "event_hooks", {}).values()):
        return False
    return not _has_replaced_parts(sdk) and all(_is_own(owner, method) for owner, method in _methods(sdk))


def settings_of(sdk: Any) -> tuple[Any, ...]:
    """What `transport_of` reads of it. A key or a URL may be set anew at any time, and counts from then on."""
    headers = tuple(sdk._custom_headers.items())
    return (sdk.base_url, sdk.api_key, sdk.organization, sdk.project, headers, sdk.timeout, sdk.max_retries)


def transport_of(sdk: Any) -> ModelTransport:
    """The transport that sends to the same place, with the same key and headers, and waits as long."""
    settings = settings_of(sdk)
    known = _transports.get(sdk)
    if known is None or known[0] != settings:
        made = ModelTransport(
            str(sdk.base_url),
            headers=_headers(sdk),
            timeout_s=getattr(sdk.timeout, "read", sdk.timeout),
            connect_timeout_s=getattr(sdk.timeout, "connect", sdk.timeout),
            retry=RetryPolicy(max_retries=sdk.max_retries),
        )
        known = _transports[sdk] = (settings, made)
    return known[1]


def sdk_of(transport: ModelTransport) -> Any:
    """An `AsyncOpenAI` that sends where `transport` does, for callers who want to use one themselves."""
    try:
        from openai import AsyncOpenAI
    except ImportError as error:
        raise UserError("an AsyncOpenAI needs the openai package; pip install openai") from error
    headers = {name: value for name, value in transport.headers.items() if name != "Content-Type"}
    key = headers.pop("Authorization", "").removeprefix("Bearer ") or "EMPTY"
    return AsyncOpenAI(
        base_url=transport.base_url,
        api_key=key,
        default_headers=headers,
        max_retries=transport.retry.max_retries,
    )


def _headers(sdk: Any) -> dict[str, str]:
    given = {"OpenAI-Organization": sdk.organization, "OpenAI-Project": sdk.project, **sdk._custom_headers}
    if "authorization" not in {name.lower() for name in given}:
        given |= {name: value.strip() for name, value in sdk.auth_headers.items()}
    # One that the caller leaves out on purpose is a placeholder of the package's, and no text.
    return {name: value for name, value in given.items() if isinstance(value, str)}


def _has_replaced_parts(sdk: Any) -> bool:
    """Whether a method was put on the object itself, or on what it is made of. A resource is there once it was used."""
    chat = vars(sdk).get("chat")
    resources = [vars(chat).get("completions")] if chat is not None and hasattr(chat, "__dict__") else []
    resources += [vars(sdk).get("completions"), vars(sdk).get("responses")]
    parts = [sdk, sdk._client, getattr(sdk._client, "_transport", None), *resources]
    names = {"create", "post", "request", "send", *_HANDLERS}
    return (chat is not None and type(chat).__module__.partition(".")[0] != "openai") or any(
        names & vars(part).keys() for part in parts if part is not None and hasattr(part, "__dict__")
    )


def _methods(sdk: Any) -> Iterator[tuple[type, str]]:
    """The methods of classes that a request runs through, and that tests and tracers replace."""
    prefix = "Async" if type(sdk).__name__ == "AsyncOpenAI" else ""
    for path, name in _CREATE:
        if (kind := getattr(sys.modules.get(path), prefix + name, None)) is not None:
            yield kind, "create"
    yield type(sdk), "post"
    yield type(sdk), "request"
    yield type(sdk._client), "send"
    transport = getattr(sdk._client, "_transport", None)
    for part in (transport, getattr(transport, "_pool", None)):
        yield from ((type(part), handler) for handler in _HANDLERS if hasattr(type(part), handler))


def _is_own(owner: type, method: str) -> bool:
    """Whether the code of a method lies in the package of the class that defines it."""
    definer = next((kind for kind in owner.__mro__ if method in vars(kind)), None)
    if definer is None:
        return True
    function = vars(definer)[method]
    package = sys.modules.get(definer.__module__.partition(".")[0])
    folder = Path(getattr(package, "__file__", None) or "/").parent
    return isinstance(function, FunctionType) and Path(function.__code__.co_filename).is_relative_to(folder)
