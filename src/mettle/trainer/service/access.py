"""Who asks: the key in `X-API-Key`, and the owner that it stands for.

Parts: `TenantKeys`, `new_key`; `HubOwners` (a Hub says who asks); `Signer` (links that work without a key, for a
while). Invariant: keys are compared by their digests, and what is stored or logged of one is its owner's name.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Self

from mettle.errors import UserError
from mettle.storage.files import write_atomic
from mettle.web.doors import bearer, is_same_secret, secret_digest
from mettle.web.problems import HttpError

PREFIX: Final = "tml-"
HEADER: Final = "x-api-key"
_JWT: Final = "eyJ"
"""What a JSON object's first characters are in base64."""
LINK_S: Final = 3600.0
OWNER: Final = "x-mettle-owner"
ROOT: Final = "x-mettle-root"
"""The address that the Hub's clients know the service by."""
REFUSAL: Final = "x-mettle-refusal"
"""Why the Hub lets its owner compute no more: the request is taken, and its future fails with this line."""


def new_key() -> str:
    """256 random bits, as clients want them spelled."""
    return PREFIX + secrets.token_urlsafe(32)


class TenantKeys:
    """Owners by key. Without a file each key is an owner of its own."""

    def __init__(self, owners: Mapping[bytes, str] | None) -> None:
        self._owners = owners

    @classmethod
    def read(cls, path: Path | None) -> Self:
        """The keys in a file: a line each, `tml-... name`; # begins a comment. Raises: UserError."""
        if path is None:
            return cls(None)
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise UserError(f"the keys in {path} cannot be read: {error.strerror}") from error
        owners: dict[bytes, str] = {}
        for number, line in enumerate(lines, start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if len(words) != 2 or not words[0].startswith(PREFIX):
                raise UserError(f"{path}:{number}: a line is a key that begins with {PREFIX!r} and a name")
            owners[secret_digest(words[0])] = words[1]
        if not owners:
            raise UserError(f"{path} holds no key; `mettle train key NAME >> {path}` adds one")
        return cls(owners)

    def owner(self, headers: Mapping[str, str]) -> str:
        """Who asks. Raises: HttpError 401."""
        key = headers.get(HEADER, "")
        if (key or headers.get("authorization", "").removeprefix("Bearer ")).startswith(_JWT):
            raise HttpError(
                401,
                "this is a token (JWT) of the hosted service, which this server cannot check: set TINKER_API_KEY to a"
                f" key of its own, as `mettle train key NAME` makes ({PREFIX}...), and unset TINKER_CREDENTIAL_CMD",
            )
        if not key.startswith(PREFIX):
            raise HttpError(401, f"this server wants a key that begins with {PREFIX!r} in X-API-Key")
        digest = secret_digest(key)
        if self._owners is None:
            return f"key-{digest.hex()[:16]}"
        owner = self._owners.get(digest)
        if owner is None:
            raise HttpError(401, "this key is not known here")
        return owner

    def told(self, headers: Mapping[str, str], name: str) -> str:
        """Nothing: who comes with a key of their own is not believed what a Hub is."""
        return ""


class HubOwners:
    """Owners by the word of a Hub, which has looked at their tokens: whoever has its key says whose a request is."""

    def __init__(self, key: str) -> None:
        self._key = key

    def owner(self, headers: Mapping[str, str]) -> str:
        """Who asks. Raises: HttpError 401."""
        owner = headers.get(OWNER, "")
        if not is_same_secret(bearer(headers), self._key) or not owner:
            raise HttpError(401, "this service is part of a Hub; ask there")
        return owner

    def told(self, headers: Mapping[str, str], name: str) -> str:
        """What the Hub adds to a request, looked at after its `owner`; empty where it says nothing."""
        return headers.get(name, "")


class Signer:
    """Links to files: whoever has one may read the file until it ends."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        if not path.exists():
            write_atomic(path, secrets.token_bytes(32))
            path.chmod(0o600)
        self._secret, self._clock = path.read_bytes(), clock

    def signed(self, what: str) -> tuple[str, float]:
        """`expires/signature` for a thing, and when it ends."""
        expires = int(self._clock() + LINK_S)
        return f"{expires}/{self._signature(what, expires)}", float(expires)

    def check(self, what: str, expires: str, signature: str) -> None:
        """Raises: HttpError 403."""
        is_number = expires.isascii() and expires.isdigit() and len(expires) < 15
        if not is_number or not hmac.compare_digest(signature, self._signature(what, int(expires))):
            raise HttpError(403, "this link is not one of this server's")
        if int(expires) < self._clock():
            raise HttpError(403, "this link has ended; ask for a new one")

    def _signature(self, what: str, expires: int) -> str:
        return hmac.new(self._secret, f"{expires}:{what}".encode(), hashlib.sha256).hexdigest()
