"""Who may ask: a Host that is ours, no page of another origin, no endless body, and a secret.

A page in a browser can send requests to a server on this machine: with a name of its own that it points at 127.0.0.1,
which the Host shows, or straight to the address, which the Origin shows. Programs send no Origin.
Parts: `Door` (what stands before every route of a server), `Access` (whom a route is for);
`allowed_hosts`; `bearer`, `is_same_secret`, `secret_digest`. Invariants: a route is for holders of the
key unless its table says otherwise; how long a comparison takes says nothing about the secret.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from starlette.types import Scope

from mettle.web.keys import ADMIN_KEY_ENV, Keys
from mettle.web.problems import HttpError

MAX_BODY_BYTES: Final = 64 << 20
Access = Literal["anybody", "key", "admin"]
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def is_loopback(host: str) -> bool:
    """True for an address that only this machine can reach."""
    return host in LOOPBACK_NAMES or host.startswith("127.")


def allowed_hosts(host: str, more: Iterable[str] = ()) -> frozenset[str] | None:
    """The names that a server on `host` answers to; None, any, for one that is reached from elsewhere."""
    return LOOPBACK_NAMES | {host, *more} if is_loopback(host) else None


@dataclass(frozen=True, slots=True)
class Door:
    """What stands before every route. `hosts` are the names that are answered to; None: any.

    A server that tells its callers apart by itself (by tokens, by rollouts) has no `keys` here.
    """

    hosts: frozenset[str] | None
    keys: Keys = Keys()  # noqa: RUF009 - frozen
    max_body_bytes: int | None = MAX_BODY_BYTES

    def refusal(self, scope: Scope) -> HttpError | None:
        """What is wrong with a request's Host, Origin or length, if anything is.

        A page of our own has the Host that it was loaded from as its Origin.
        """
        host, origin, length = "", None, b""
        for name, value in scope["headers"]:
            if name == b"host":
                host = value.decode("latin-1")
            elif name == b"origin":
                origin = value.decode("latin-1")
            elif name == b"content-length":
                length = value
        if self.hosts is not None and host_name(host) not in self.hosts:
            return HttpError(400, f"This server does not answer to the name {host_name(host)!r}.", code="host_refused")
        if origin is not None and origin.partition("://")[2] != host:
            return HttpError(403, f"This server takes no requests from pages of {origin!r}.", code="origin_refused")
        if length and self.max_body_bytes is not None and int(length) > self.max_body_bytes:
            return body_too_long(self.max_body_bytes)
        return None

    def admit(self, access: Access, scope: Scope) -> None:
        """Raises: HttpError 401 without the secret that the route wants, 403 where there is none that opens it."""
        if access == "anybody" or (access == "key" and not self.keys.api):
            return
        if access == "admin" and not self.keys.admin:
            message = f"the admin routes of this server are closed: it was started without {ADMIN_KEY_ENV}"
            raise HttpError(403, message, code="admin_closed")
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"").decode("latin-1")
        given = bearer({"authorization": given})
        is_admin = bool(self.keys.admin) and is_same_secret(given, self.keys.admin)
        if is_admin or (access == "key" and is_same_secret(given, self.keys.api)):
            return
        wanted = "its admin key" if access == "admin" else "its key"
        raise HttpError(
            401,
            f"this server wants {wanted}: `Authorization: Bearer ...`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def body_too_long(max_bytes: int) -> HttpError:
    return HttpError(413, f"the body is longer than the {max_bytes:,} bytes that are taken", code="too_large")


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
