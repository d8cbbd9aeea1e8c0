"""Bearer tokens: made once, shown once, kept as hashes, compared in constant time.

The tokens file is JSON: `{"tokens": [{"name", "sha256", "created", "quota"?}]}`, mode 0600. A token has 256 random
bits, so that a plain SHA-256 is enough. Invariant: no token is ever written, logged, or taken from a command line.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from pydantic import ValidationError

from mettle.errors import UserError
from mettle.sandbox.service.config import QuotaConfig
from mettle.sandbox.service.faults import TokenRefused

logger = logging.getLogger(__name__)

TOKEN_ENV: Final = "METTLE_SANDBOX_TOKEN"
GIVEN: Final = "env"
"""Holder of the token in the service's own environment: whoever runs the service."""
LOCAL: Final = "local"
"""Holder of everything that comes through the service's own Unix socket."""
_PREFIX: Final = "msb_"
_MIN_LENGTH: Final = 16
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Holder:
    """Who a token belongs to, and what that gives."""

    name: str
    quota: QuotaConfig


class TokenBook(Protocol):
    """Who tokens belong to, whoever keeps them."""

    def holder(self, header: str | None) -> Holder:
        """Whose token an `Authorization` header has. Raises: TokenRefused."""
        ...

    def knows(self, name: str) -> bool:
        """Whether somebody of that name may still ask."""
        ...


class Tokens:
    """The tokens that a service knows: those of its file, one of its environment, and short-lived ones of its own."""

    def __init__(self, quota: QuotaConfig, path: Path | None = None, given: str | None = None) -> None:
        self._quota = quota
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._filed: dict[bytes, Holder] = {}
        self._given: dict[bytes, Holder] = {}
        if given is not None:
            if len(given) < _MIN_LENGTH:
                raise UserError(f"the token in {TOKEN_ENV} has {len(given)} characters; it needs {_MIN_LENGTH} or more")
            self._given[digest(given)] = Holder(GIVEN, quota)
        self._reload()

    @property
    def is_empty(self) -> bool:
        self._reload()
        return not self._filed and not self._given

    def holder(self, header: str | None) -> Holder:
        """Whose token an `Authorization` header has. Raises: TokenRefused."""
        self._reload()
        scheme, _, token = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise TokenRefused("this sandbox service needs a token: `Authorization: Bearer ...`")
        wanted = digest(token.strip())
        found: Holder | None = None
        for known, holder in [*self._filed.items(), *self._given.items()]:  # all of them, whichever it is
            if hmac.compare_digest(known, wanted):
                found = holder
        if found is None:
            raise TokenRefused("this sandbox service does not know the token")
        return found

    def knows(self, name: str) -> bool:
        """Whether a token of that name is still good."""
        self._reload()
        return any(holder.name == name for holder in (*self._filed.values(), *self._given.values()))

    def _reload(self) -> None:
        """Take up what has changed in the file; one that has become unreadable changes nothing."""
        if self._path is None:
            return
        try:
            found = self._path.stat()
            stamp = (found.st_mtime_ns, found.st_size)
        except FileNotFoundError:
            self._filed, self._stamp = {}, None
            return
        if stamp == self._stamp:
            return
        try:
            rows = read_tokens(self._path)
            self._filed = {bytes.fromhex(row["sha256"]): _holder(row, self._quota) for row in rows}
        except (UserError, ValueError, KeyError, TypeError) as error:
            if self._stamp is None:
                raise UserError(f"{self._path} is not a file of tokens: {error}") from error
            logger.warning("the tokens file cannot be read; those that were known stay", extra={"why": str(error)})
        self._stamp = stamp


def digest(token: str) -> bytes:
    """What is kept of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def add_token(path: Path, name: str, quota: Mapping[str, Any] | None = None) -> str:
    """Make a token, keep its hash under `name`, and return it: the only time that it is seen."""
    if not _NAME.fullmatch(name) or name in (GIVEN, LOCAL):
        raise UserError(
            f"a token's name is letters, digits, '.', '_' and '-', up to 64 of them, not {name!r}"
            + (" (kept for the service's own)" if name in (GIVEN, LOCAL) else "")
        )
    rows = read_tokens(path)
    if any(row["name"] == name for row in rows):
        raise UserError(f"there is a token {name!r} already; `mettle sandbox token {name} --revoke` ends it")
    token = _PREFIX + secrets.token_urlsafe(32)
    row: dict[str, Any] = {"name": name, "sha256": digest(token).hex(), "created": int(time.time())}
    if quota:
        row["quota"] = dict(quota)
        _holder(row, QuotaConfig())
    _write(path, [*rows, row])
    return token


def revoke_token(path: Path, name: str) -> None:
    """Forget a token; services that read the file refuse it from now on."""
    rows = read_tokens(path)
    left = [row for row in rows if row["name"] != name]
    if len(left) == len(rows):
        raise UserError(f"there is no token {name!r} in {path}; it has {', '.join(r['name'] for r in rows) or 'none'}")
    _write(path, left)


def read_tokens(path: Path) -> list[dict[str, Any]]:
    """The rows of a tokens file; none when there is no file."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["tokens"]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a file of tokens: {type(error).__name__}") from error
    if not all(isinstance(row, dict) and {"name", "sha256"} <= set(row) for row in rows):
        raise UserError(f"{path} is not a file of tokens: each has a name and a sha256")
    return list(rows)


def _holder(row: dict[str, Any], default: QuotaConfig) -> Holder:
    try:
        own = {name: value for name, value in row.get("quota", {}).items() if value is not None}
        quota = QuotaConfig.model_validate({**default.model_dump(), **own})
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"the quota of token {row['name']!r}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None
    return Holder(str(row["name"]), quota)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({"tokens": rows}, file, indent=1)
    beside.replace(path)


def default_tokens_file() -> Path:
    """Where tokens are kept unless another file is named."""
    home = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(home) / "mettle" / "sandbox-tokens.json"
