"""Keys that an environment needs from the process environment."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mettle.errors import UserError


class MissingKeyError(UserError, ValueError):
    """Environment variables that are not set; `keys` names them."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(f"environment variables not set: {', '.join(keys)}")
        self.keys = list(keys)


def ensure_keys(keys: Sequence[str]) -> None:
    """Raise `MissingKeyError` unless every variable is set."""
    missing = [key for key in keys if not os.environ.get(key)]
    if missing:
        raise MissingKeyError(missing)
