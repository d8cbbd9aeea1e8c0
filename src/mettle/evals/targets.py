"""The model of an evaluation: at an endpoint, in a directory, by an endpoint's id, or at a provider.

Parts: `Target`, `find_target`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mettle.clients.config import ClientConfig
from mettle.clients.endpoints import ENDPOINTS_FILE, NamedEndpoint, Registry, read_registry
from mettle.clients.factory import client_type_named
from mettle.clients.prices import Price
from mettle.config import nearest
from mettle.errors import UserError
from mettle.evals.spec import RolloutSettings

Served = tuple[str, str]
"""Base URL and model name of a model directory that is being served."""


@dataclass(slots=True)
class Target:
    """A model that answers somewhere."""

    client: ClientConfig
    model: str
    price: Price | None = None


def find_target(spec: RolloutSettings, serve: Callable[[Path], Served]) -> Target:
    """The model: at the endpoint that was given, in a directory, by an endpoint's id, or at a provider."""
    registry = _registry(spec)
    named = registry.endpoints.get(spec.model)
    if spec.api_base_url is None and spec.provider is None:
        if Path(spec.model).is_dir():
            base_url, model = serve(Path(spec.model))
            config = _config(spec, base_url, tokenizer=spec.tokenizer or spec.model)
            return Target(config, model, registry.price(model))
        if named:
            return _named_target(spec, registry, named)
        close = nearest(spec.model, list(registry.endpoints))
        hint = f"did you mean {close!r}? Else " if close else ""
        raise UserError(
            f"{spec.model!r} is no model directory and no endpoint in {registry.path}; "
            f"{hint}say with -b where a server has it, or with -p who does"
        )
    model = named[0].model if named else spec.model
    price = registry.price(model, spec.model)
    if spec.provider is None:
        return Target(_config(spec, str(spec.api_base_url)), spec.model, price)
    provider = registry.provider(spec.provider)
    config = _config(spec, spec.api_base_url or provider.url, provider.key, provider.type, provider.headers)
    return Target(config, model, price)


def _named_target(spec: RolloutSettings, registry: Registry, named: Sequence[NamedEndpoint]) -> Target:
    configs = [
        replace(_config(spec, e.url, e.key, e.type, e.headers), model=e.model, client_idx=index)
        for index, e in enumerate(named)
    ]
    first = named[0]
    config = replace(configs[0], endpoint_configs=configs) if len(configs) > 1 else configs[0]
    same_price = first.price if all(endpoint.price == first.price for endpoint in named) else None
    return Target(config, first.model, same_price or registry.price(first.model, spec.model))


def _config(
    spec: RolloutSettings,
    base_url: str,
    api_key_var: str | None = None,
    client_type: str = "chat",
    headers: Mapping[str, str] | None = None,
    tokenizer: str | None = None,
) -> ClientConfig:
    return ClientConfig(
        api_base_url=base_url,
        api_key_var=spec.api_key_var or api_key_var,
        client_type=client_type_named(spec.api_client_type or client_type),
        max_retries=spec.max_retries,
        extra_headers={**(headers or {}), **spec.headers},
        extra_headers_from_state=spec.headers_from_state,
        tokenizer=spec.tokenizer or tokenizer,
    )


def _registry(spec: RolloutSettings) -> Registry:
    if spec.endpoints_path is None:
        return read_registry(ENDPOINTS_FILE)
    given = Path(spec.endpoints_path)
    return read_registry(given / ENDPOINTS_FILE.name if given.is_dir() else given, is_needed=True)
