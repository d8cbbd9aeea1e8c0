"""Which endpoint to talk to, as data: `ClientConfig`, and the transport that it describes.

Invariant: no key is stored here, only the name of the environment variable that holds it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from mettle.clients.transport import LOOPBACK_HOSTS, ModelTransport, RetryPolicy
from mettle.errors import UserError


@dataclass
class ClientConfig:
    """An endpoint. `client_type` is one of `mettle.clients.factory.CLIENT_TYPES`, or a short name for one.

    Without `api_key_var`, a key (OPENAI_API_KEY) is sent to api.openai.com and to nobody else. `model` overrides the
    model that is asked for. `extra_headers_from_state` maps names of headers to keys of the rollout's state, whose
    values each of its requests carries. With `endpoint_configs`, rollouts take turns among those. `tokenizer` is a
    model directory, for the client type that renders prompts itself.
    """

    api_base_url: str = "https://api.openai.com/v1"
    api_key_var: str | None = None
    client_type: str = "openai_chat_completions"
    timeout: float = 3600.0
    max_retries: int = 5
    extra_headers: dict[str, str] = field(default_factory=dict)
    extra_headers_from_state: dict[str, str] = field(default_factory=dict)
    client_idx: int = 0
    endpoint_configs: list[ClientConfig] = field(default_factory=list)
    model: str | None = None
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        """Read variants that were written down as dicts."""
        self.endpoint_configs = [ClientConfig(**c) if isinstance(c, dict) else c for c in self.endpoint_configs]


def transport_for(config: ClientConfig | str) -> ModelTransport:
    """A transport to the endpoint of `config`, or to a base URL. A loopback endpoint needs no key."""
    if isinstance(config, str):
        config = ClientConfig(api_base_url=config)
    host = urlsplit(config.api_base_url).hostname or ""
    if not config.api_base_url.startswith(("http://", "https://")) or not host:
        raise UserError(f"{config.api_base_url!r} is no base URL; give one like http://127.0.0.1:8000/v1")
    key_var = config.api_key_var or ("OPENAI_API_KEY" if host == "api.openai.com" else None)
    api_key = os.environ.get(key_var) if key_var else None
    if key_var and api_key is None and host not in LOOPBACK_HOSTS:
        raise UserError(f"{config.api_base_url} wants a key; set the environment variable {key_var}")
    return ModelTransport(
        config.api_base_url,
        api_key=api_key,
        headers=config.extra_headers,
        timeout_s=config.timeout,
        retry=RetryPolicy(max_retries=config.max_retries),
    )
