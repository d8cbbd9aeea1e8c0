"""The secrets of an inference server: from whoever starts it, by its environment, to the doors of its routes.

A command line shows what it holds to everybody on the machine; an environment, to its own user alone. Imports nothing
of a server, so that whoever starts one can make them.
"""

from __future__ import annotations

import hmac
import os
import secrets
from dataclasses import dataclass
from typing import Final, Self

API_KEY_ENV: Final = "METTLE_API_KEY"
ADMIN_KEY_ENV: Final = "METTLE_ADMIN_KEY"
WORKERS_KEY_ENV: Final = "METTLE_WORKERS_KEY"


@dataclass(frozen=True, slots=True)
class Keys:
    """Without `api` the routes of a server are open; without `admin` its admin routes are closed."""

    api: str = ""
    admin: str = ""

    @classmethod
    def new(cls) -> Self:
        """256 random bits each."""
        return cls(secrets.token_urlsafe(32), secrets.token_urlsafe(32))

    @classmethod
    def from_environment(cls) -> Self:
        """Those that this process was started with. The admin key is taken away: its children have no use for it."""
        return cls(os.environ.get(API_KEY_ENV, ""), os.environ.pop(ADMIN_KEY_ENV, ""))

    def environment(self) -> dict[str, str]:
        """For the process that is to have them."""
        return {API_KEY_ENV: self.api, ADMIN_KEY_ENV: self.admin}

    @property
    def workers(self) -> str:
        """What has workers started on other nodes; it tells nothing of the admin key that it is made from."""
        return self._derived(b"workers")

    @property
    def sandboxes(self) -> str:
        """The token of the run's sandbox services, which its environments have."""
        return self._derived(b"sandboxes")

    def _derived(self, purpose: bytes) -> str:
        return hmac.digest(self.admin.encode(), purpose, "sha256").hex()
