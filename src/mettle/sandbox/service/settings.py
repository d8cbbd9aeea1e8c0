"""A service's settings from the command line and a TOML file, and a token's quota from words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mettle.config.loader import load_config
from mettle.errors import UserError
from mettle.sandbox.config import SandboxConfig, read_requirement
from mettle.sandbox.service.config import QuotaConfig, ServiceConfig
from mettle.sandbox.service.tokens import default_tokens_file


def service_config(
    file: Path | None,
    *,
    host: str,
    port: int,
    unix: Path | None,
    tokens: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    public_url: str | None,
    backend: str,
    max_running: int | None,
) -> ServiceConfig:
    """The settings; what a file says counts where the command line says nothing of its own. Raises: UserError."""
    default = ServiceConfig()
    over: dict[str, Any] = {
        "host": host if host != default.host else None,
        "port": port if port != default.port else None,
        "unix": str(unix) if unix else None,
        "tokens_file": str(tokens) if tokens else None,
        "tls_cert": str(tls_cert) if tls_cert else None,
        "tls_key": str(tls_key) if tls_key else None,
        "public_url": public_url,
        "sandbox.backend": backend if backend != default.sandbox.backend else None,
        "sandbox.max_running": max_running,
    }
    given = {name: value for name, value in over.items() if value is not None}
    config = load_config(ServiceConfig, [file] if file else [], given).config
    if config.tokens_file is None and config.unix is None:
        config = config.model_copy(update={"tokens_file": default_tokens_file()})
    return config


def sandbox_config(file: Path | None, backend: str | None, required: Sequence[str]) -> SandboxConfig:
    """The table `[sandbox]` of a service's file, with another backend or requirement. Raises: UserError."""
    require = read_requirement(required).require
    given = {"sandbox.backend": backend} if backend else {}
    found = load_config(ServiceConfig, [file] if file else [], given).config.sandbox
    return found.model_copy(update={"require": require}) if required else found


def parse_quota(words: Sequence[str]) -> dict[str, float]:
    """`name=number` as a quota. Raises: UserError."""
    quota: dict[str, float] = {}
    for word in words:
        name, _, number = word.partition("=")
        if name not in QuotaConfig.model_fields:
            raise UserError(f"there is no quota {name!r}; there are {', '.join(QuotaConfig.model_fields)}")
        try:
            quota[name] = float(number) if "per_s" in name else int(number)
        except ValueError:
            raise UserError(f"quota {word!r} needs a number, as in {name}=20") from None
    return quota
