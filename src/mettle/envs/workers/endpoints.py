"""Which model a worker talks to, as data: a client described here and made there.

Parts: `client_spec`, `ClientCache`. Invariants: no key crosses (a worker reads the same environment variables); a
client that is only an object here cannot be described, which is a `UserError` that says what can.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from mettle.clients.base import Client
from mettle.clients.config import ClientConfig
from mettle.clients.factory import client_from, client_type_of
from mettle.errors import UserError

Spec = dict[str, Any]


def token_spec(
    base_url: str, model_dir: str, api_key_var: str | None = None, *, trains_at: float | None = None
) -> Spec:
    """Token in, token out at `base_url`, rendered by the tokenizer and template in `model_dir`.

    `trains_at` is the temperature of what is to be trained (see `TokenClient`).
    """
    endpoint = {"api_base_url": base_url, "api_key_var": api_key_var}
    return {"tokens": endpoint, "model_dir": model_dir, "trains_at": trains_at}


def client_spec(client: Any) -> Spec:
    """A client, `ClientConfig` or base URL as data.

    Raises: UserError when it cannot be made again in another process.
    """
    source = client
    if isinstance(client, Client):
        source = getattr(client, "source", None) or getattr(getattr(client, "endpoint", None), "source", None)
    if isinstance(source, str):
        source = ClientConfig(api_base_url=source)
    if isinstance(source, ClientConfig) and (kind := client_type_of(client)):
        source = dataclasses.replace(source, client_type=kind)
    is_theirs = isinstance(client, Client) and not type(client).__module__.startswith("mettle.")
    if is_theirs or not isinstance(source, ClientConfig):
        raise UserError(
            f"a worker process makes its own client and cannot take over a {type(client).__name__}; "
            "give a base URL or a ClientConfig"
        )
    return {"config": dataclasses.asdict(source)}


class ClientCache:
    """Clients made from their descriptions, each once."""

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}
        self._renderers: dict[str, Any] = {}

    def client(self, spec: Mapping[str, Any]) -> Client:
        """The client of a description."""
        key = json.dumps(spec, sort_keys=True)
        if key not in self._clients:
            self._clients[key] = self._make(spec)
        return self._clients[key]

    async def close(self) -> None:
        """Close every connection."""
        for client in self._clients.values():
            await client.close()

    def _make(self, spec: Mapping[str, Any]) -> Client:
        if "tokens" not in spec:
            return client_from(ClientConfig(**spec["config"]))
        from mettle.clients.renderer import Renderer
        from mettle.clients.tokens import TokenClient

        model_dir = spec["model_dir"]
        if model_dir not in self._renderers:
            self._renderers[model_dir] = Renderer.from_directory(model_dir)
        endpoint, trains_at = ClientConfig(**spec["tokens"]), spec.get("trains_at")
        return TokenClient(endpoint, self._renderers[model_dir], trains_at=trains_at)
