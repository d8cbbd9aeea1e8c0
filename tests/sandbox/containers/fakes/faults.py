"""Failures that a fake control plane is told to have."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class Fault:
    """The next `times` requests whose method and path match get this answer, or no answer at all (status 0)."""

    method: str
    path: str
    status: int
    message: str
    headers: dict[str, str]
    times: int
    is_after: bool = False  # the request is carried out, and its answer lost

    def matches(self, request: web.Request) -> bool:
        return self.times > 0 and request.method == self.method and re.search(self.path, request.path) is not None


@dataclass
class Faults:
    """Those that are still to come, and every request that has come."""

    planned: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def plan(
        self,
        method: str,
        path: str,
        status: int,
        message: str = "as planned",
        *,
        headers: dict[str, str] | None = None,
        times: int = 1,
        is_after: bool = False,
    ) -> None:
        self.planned.append(Fault(method, path, status, message, headers or {}, times, is_after))

    def next(self, request: web.Request) -> Fault | None:
        self.requests.append(f"{request.method} {request.path}")
        for fault in self.planned:
            if fault.matches(request):
                fault.times -= 1
                return fault
        return None

    def num(self, pattern: str) -> int:
        """How many requests there were like this."""
        return sum(re.search(pattern, seen) is not None for seen in self.requests)


def hang_up(request: web.Request) -> web.Response:
    """No answer: the connection ends."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
