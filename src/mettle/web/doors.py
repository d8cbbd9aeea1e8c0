"""Who may ask: a Host that is ours, no page of another origin, and a secret.

A page in a browser can send requests to a server on this machine: with a name of its own that it points at 127.0.0.1,
which the Host shows, or straight to the address, which the Origin shows. Programs send no Origin.
Parts: `allowed_hosts`, `refused_host`; `bearer`, `is_same_secret`, `secret_digest`. Invariant: how long a comparison
takes says nothing about the secret.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from typing import Final

from mettle.web.problems import HttpError

LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def is_loopback(host: str) -> bool:
    """True for an address that only this machine can reach."""
    return host in LOOPBACK_NAMES or host.startswith("127.")


def allowed_hosts(host: str, more: Iterable[str] = ()) -> frozenset[str] | None:
    """The names that a server on `host` answers to; None, any, for one that is reached from elsewhere."""
    return LOOPBACK_NAMES | {host, *more} if is_loopback(host) else None


def refused_host(host: str, origin: str | None, allowed: frozenset[str] | None) -> HttpError | None:
    """What is wrong with a request's Host and Origin headers, if anything is.

    A page of our own has the Host that it was loaded from as its Origin.
    """
    if allowed is not None and host_name(host) not in allowed:
        return HttpError(400, f"This server does not answer to the name {host_name(host)!r}.", code="host_refused")
    if origin is not None and origin.partition("://")[2] != host:
        return HttpError(403, f"This server takes no requests from pages of {origin!r}.", code="origin_refused")
    return None


def host_name(header: str) -> str:
    """The host of a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def bearer(headers: Mapping[str, str]) -> str:
    """The secret of an `Authorization: Bearer` header; empty where there is none."""
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""


def is_same_secret(given: str, secret: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode("utf-8", "replace"))


def secret_digest(secret: str) -> bytes:
    """What a table of secrets is looked up by, so that the time of a look-up tells nothing about them."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).digest()
