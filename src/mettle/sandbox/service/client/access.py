"""How a client comes to a service: its address, its token, and the certificates that it trusts.

Invariant: a token leaves this host over TLS, to a service whose certificate was checked, or over plain HTTP only if the
config says in so many words that this network may read it.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

import aiohttp

from mettle.errors import UserError
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.service.config import is_this_host

_UNKNOWN_ISSUER: Final = (2, 18, 19, 20, 21)
_TIMES: Final = {9: "is not valid yet", 10: "has expired"}
_OTHER_NAME: Final = (62, 64)
_NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")


class NotTrusted(UserError):
    """The service has shown no certificate that this client accepts."""


@dataclass(frozen=True, slots=True)
class ServiceAccess:
    """What a client brings."""

    token: str | None = None
    ca_file: Path | None = None
    plain_http: bool = False

    @classmethod
    def of(cls, config: SandboxConfig) -> Self:
        """As the config says, with the token from the environment."""
        return cls(os.environ.get(config.token_env), config.ca_file, config.plain_http)

    def check(self, url: str) -> None:
        """Raises: UserError for what is no address of a service, or one that a token must not be sent to."""
        parts = urlsplit(url)
        if url.startswith("unix:/"):
            return
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise UserError(f"{url!r} is not the address of a sandbox service; write https://host:port or unix:/path")
        if parts.scheme == "http" and self.token and not self.plain_http and not is_this_host(parts.hostname):
            raise UserError(
                f"the token is not sent to {url} over plain HTTP, where the network can read it: serve with "
                "--tls-cert and write https://, or say --plain-http (sandbox.plain_http)"
            )

    def connector(self, url: str) -> tuple[str, aiohttp.BaseConnector]:
        """Where requests go, and what opens connections there. Raises: UserError."""
        self.check(url)
        if url.startswith("unix:"):
            return "http://sandbox", aiohttp.UnixConnector(path=url.removeprefix("unix:"), limit=0)
        if url.startswith("https:"):
            return url, aiohttp.TCPConnector(limit=0, ssl=_trust(self.ca_file))
        return url, aiohttp.TCPConnector(limit=0)


def not_trusted(url: str, error: BaseException) -> NotTrusted | None:
    """What an error of TLS means to a person; None for other errors."""
    known = _first(error, lambda cause: hasattr(cause, "verify_code"))
    if isinstance(known, ssl.SSLCertVerificationError):
        return NotTrusted(f"sandbox service {url}: {_reason(known)}")
    failed = _first(error, lambda cause: isinstance(cause, ssl.SSLError))
    if failed is None:
        return None
    if _first(error, lambda cause: getattr(cause, "reason", None) in _NOT_TLS) is not None:
        return NotTrusted(f"sandbox service {url} does not speak TLS; is it http:// there?")
    return NotTrusted(f"sandbox service {url}: no TLS connection: {' '.join(str(error).split())}")


def _reason(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _UNKNOWN_ISSUER:
        return "its certificate was signed by nobody known here; --ca-file (sandbox.ca_file) names who signed it"
    if error.verify_code in _OTHER_NAME:
        return "its certificate is for another name; use a name or address that is in it"
    return f"its certificate {_TIMES.get(error.verify_code, f'is refused: {error.verify_message}')}"


def _first(error: BaseException | None, is_it: Callable[[BaseException], bool]) -> BaseException | None:
    """The error, or the first of its causes, that is it."""
    while error is not None:
        held = getattr(error, "os_error", None) or getattr(error, "certificate_error", None)
        for one in (error, held):
            if one is not None and is_it(one):
                return one
        error = error.__cause__
    return None


def _trust(ca_file: Path | None) -> ssl.SSLContext:
    """The host's own authorities, or those of a file instead. Raises: UserError."""
    try:
        return ssl.create_default_context(cafile=ca_file and str(ca_file))
    except OSError as error:
        why = "holds no certificate" if isinstance(error, ssl.SSLError) else os.strerror(error.errno or 0).lower()
        raise UserError(f"sandbox.ca_file {ca_file}: {why}") from error
