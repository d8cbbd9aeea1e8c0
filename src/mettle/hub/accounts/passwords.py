"""Passwords, as argon2id keeps them (RFC 9106, the second recommended parameters)."""

from __future__ import annotations

import secrets
from functools import cache

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from mettle.errors import UserError

MIN_LENGTH = 10
MAX_LENGTH = 200


class Passwords:
    """Hashes and checks. A check of a name that nobody has takes as long as any other."""

    def __init__(self, *, memory_kib: int = 65536, passes: int = 3) -> None:
        self._hasher = PasswordHasher(time_cost=passes, memory_cost=memory_kib, parallelism=4 if memory_kib > 64 else 1)
        self._nobodys = cache(lambda: self._hasher.hash(secrets.token_urlsafe()))

    def hash(self, password: str) -> str:
        """What is stored. Raises: UserError when it is too short or too long."""
        if not MIN_LENGTH <= len(password) <= MAX_LENGTH:
            raise UserError(f"a password has {MIN_LENGTH} to {MAX_LENGTH} characters, and this has {len(password)}")
        return self._hasher.hash(password)

    def is_right(self, stored: str | None, password: str) -> bool:
        """Whether a password is the stored one; `stored` None is a person that there is not."""
        try:
            return self._hasher.verify(stored or self._nobodys(), password[:MAX_LENGTH]) and stored is not None
        except (VerificationError, InvalidHashError):
            return False
