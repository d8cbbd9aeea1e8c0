"""Who looks at a page: what the bar at its top shows, without each page having to hand it on."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Viewer:
    """`slug` None is somebody who is not signed in."""

    slug: str | None = None
    is_admin: bool = False
    csrf: str = ""
    here: str = "/"
    """Path of the page."""


viewer: ContextVar[Viewer | None] = ContextVar("viewer", default=None)
"""None where the server knows no people: the page of one run."""
