"""Where a Docker daemon listens."""

from __future__ import annotations

import ssl
from typing import NamedTuple


class Address(NamedTuple):
    """Where the daemon listens."""

    text: str
    path: str | None  # of a unix socket
    host: str
    port: int
    tls: ssl.SSLContext | None
