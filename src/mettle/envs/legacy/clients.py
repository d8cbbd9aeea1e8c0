"""The functions of `verifiers.utils.client_utils`: SDK clients from a `ClientConfig`.

The library talks to endpoints over its own transport; environments that call a judge or a simulated user themselves
make SDK clients with these. Invariant: the SDKs are imported when one is asked for.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from mettle.clients.config import ClientConfig
from mettle.clients.endpoint_clients import OpenAIChatCompletionsClient
from mettle.clients.factory import client_from
from mettle.errors import UserError

logger = logging.getLogger(__name__)

PRIME_KEY_VAR = "PRIME_API_KEY"


def load_prime_config() -> dict[str, Any]:
    """What the `prime` command line has stored for this person; empty when there is nothing."""
    path = Path.home() / ".prime" / "config.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        logger.warning("cannot read %s: %s", path, error)
        return {}
    return stored if isinstance(stored, dict) else {}


def resolve_client_config(config: ClientConfig) -> ClientConfig:
    """The endpoint that a config stands for, which is the one of its index where it lists several."""
    choices = resolve_client_configs(config)
    return choices[config.client_idx % len(choices)]


def resolve_client_configs(config: ClientConfig) -> list[ClientConfig]:
    """Every endpoint that a config lists, or the one that it is."""
    listed: list[ClientConfig] = list(getattr(config, "endpoint_configs", None) or [])
    return listed or [config]


def setup_openai_client(config: ClientConfig) -> Any:
    """An `AsyncOpenAI` for the endpoint."""
    try:
        from openai import AsyncOpenAI
    except ImportError as error:
        raise UserError("an AsyncOpenAI needs the openai package; pip install openai") from error
    return AsyncOpenAI(**_options(config))


def setup_anthropic_client(config: ClientConfig) -> Any:
    """An `AsyncAnthropic` for the endpoint."""
    try:
        from anthropic import AsyncAnthropic
    except ImportError as error:
        raise UserError("an AsyncAnthropic needs the anthropic package; pip install anthropic") from error
    return AsyncAnthropic(**_options(config))


OpenAIClient = OpenAIChatCompletionsClient
setup_client = setup_openai_client
resolve_client = client_from


def _options(config: ClientConfig) -> dict[str, Any]:
    chosen = resolve_client_config(config)
    key = os.environ.get(chosen.api_key_var or "OPENAI_API_KEY")
    headers = dict(chosen.extra_headers)
    if chosen.api_key_var == PRIME_KEY_VAR:
        stored = load_prime_config()
        key = key or stored.get("api_key")
        team = os.environ.get("PRIME_TEAM_ID") or stored.get("team_id")
        if team:
            headers["X-Prime-Team-ID"] = team
    return {
        "api_key": key or "EMPTY",
        "base_url": chosen.api_base_url,
        "timeout": chosen.timeout,
        "max_retries": chosen.max_retries,
        "default_headers": headers,
    }
