"""What an agent refuses, and how it says so: the typed line of a sandbox service.

Parts: `BodyTooLarge`, `NoSuch`, `UnknownJob`; `refuse`. Invariant: whatever a handler raises becomes one such line.
"""

from __future__ import annotations

import errno
import json
import os
from typing import Any

from mettle.errors import UserError
from mettle.sandbox.containers.agent.http import Request
from mettle.sandbox.service.messages import ERROR_HEADER, STATUSES


class BodyTooLarge(UserError):
    """A body over its limit."""


class NoSuch(UserError):
    """There is no such connection, or route."""


class UnknownJob(UserError):
    """There is no such job."""


async def refuse(request: Request, error: Exception) -> None:
    """Answer with it."""
    kinds: dict[type[Exception], str] = {BodyTooLarge: "too_large", UnknownJob: "no_job", NoSuch: "no_route"}
    kind = kinds.get(type(error), "user")
    body: dict[str, Any] = {"type": kind, "message": str(error) or type(error).__name__}
    if isinstance(error, OSError):
        number = error.errno or (errno.ETIMEDOUT if isinstance(error, TimeoutError) else errno.EIO)
        what = {"errno": number, "strerror": error.strerror or os.strerror(number), "what": error.filename}
        body = {"type": "os", "message": str(error), **what}
    told = json.dumps({"error": body})
    await request.answer({"error": body}, STATUSES[body["type"]], {ERROR_HEADER: told} if request.is_websocket else {})
