"""What the routes of a service share, and how they get at it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from aiohttp import web

from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.protocols import Judge
from mettle.sandbox.service.config import ServiceConfig
from mettle.sandbox.service.idempotency import IdempotentRequests
from mettle.sandbox.service.idle_connections import IdleConnections
from mettle.sandbox.service.leases import ClientLeases
from mettle.sandbox.service.machines import MachineRecord, Register
from mettle.sandbox.service.metrics import ServiceMetrics
from mettle.sandbox.service.quotas import Quotas
from mettle.sandbox.service.tokens import Holder, Tokens

CLIENT_HEADER = "Mettle-Client"
KEY_HEADER = "Idempotency-Key"


@dataclass(frozen=True, slots=True)
class Pass:
    """Leave to use one machine for a while, without the token of its owner."""

    holder: Holder
    machine_id: str
    expires: float


@dataclass
class SandboxService:
    """One service while it runs."""

    config: ServiceConfig
    tokens: Tokens
    register: Register
    judge: Judge | None
    quotas: Quotas
    metrics: ServiceMetrics
    leases: ClientLeases
    idle_connections: IdleConnections = field(default_factory=IdleConnections)
    idempotent: IdempotentRequests = field(default_factory=IdempotentRequests)
    reports: dict[str, IsolationReport] = field(default_factory=dict)
    passes: dict[bytes, Pass] = field(default_factory=dict)
    """By the hash of what the bearer shows, the oldest first."""
    is_closing: bool = False
    num_open: int = 0
    num_judging: int = 0
    last_used: float = field(default_factory=time.monotonic)
    endings: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.transfers = asyncio.Semaphore(self.config.max_transfers)

    def seen(self, report: IsolationReport) -> str:
        """The name of an isolation report, under which clients may ask for it."""
        text = json.dumps(report.as_dict(), sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.reports[name] = report
        return name


HOLDER: ContextVar[Holder] = ContextVar("holder")
"""Of the request that is being answered; set before its handler is called."""
SERVICE: web.AppKey[SandboxService] = web.AppKey("service")


def service_of(request: web.Request) -> SandboxService:
    return request.app[SERVICE]


def holder_of(_: web.Request) -> Holder:
    """Whose token the request came with."""
    return HOLDER.get()


def client_of(request: web.Request) -> str:
    """Who sent it, for the lease; empty when it wants none."""
    return request.headers.get(CLIENT_HEADER, "")[:64]


def record_of(request: web.Request) -> MachineRecord:
    """The running machine that the path names."""
    return service_of(request).register.running(holder_of(request), request.match_info["id"])
