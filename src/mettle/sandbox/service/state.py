"""What the routes of a service share, and how they get at it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import time
from dataclasses import dataclass, field

from starlette.requests import HTTPConnection

from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.protocols import Judge
from mettle.sandbox.service.config import ServiceConfig
from mettle.sandbox.service.exposures import Exposures
from mettle.sandbox.service.idempotency import IdempotentRequests
from mettle.sandbox.service.leases import ClientLeases
from mettle.sandbox.service.long_bodies import LongBodies
from mettle.sandbox.service.machines import MachineRecord, Register
from mettle.sandbox.service.messages import CLIENT_HEADER, KEY_HEADER
from mettle.sandbox.service.metrics import ServiceMetrics
from mettle.sandbox.service.quotas import Quotas
from mettle.sandbox.service.tokens import Holder, TokenBook


@dataclass(frozen=True, slots=True)
class Pass:
    """Leave to use one machine for a while, without the token of its owner."""

    holder: Holder
    machine_id: str
    expires: float


@dataclass
class PortListener:
    """Connections that have been made inside, on a port that a client listens on, and not been fetched yet."""

    pending: dict[str, socket.socket] = field(default_factory=dict)


@dataclass
class SandboxService:
    """One service while it runs."""

    config: ServiceConfig
    tokens: TokenBook
    register: Register
    judge: Judge | None
    quotas: Quotas
    metrics: ServiceMetrics
    leases: ClientLeases
    long_bodies: LongBodies = field(default_factory=LongBodies)
    idempotent: IdempotentRequests = field(default_factory=IdempotentRequests)
    reports: dict[str, IsolationReport] = field(default_factory=dict)
    passes: dict[bytes, Pass] = field(default_factory=dict)
    """By the hash of what the bearer shows, the oldest first."""
    is_closing: bool = False
    num_open: int = 0
    num_judging: int = 0
    last_used: float = field(default_factory=time.monotonic)
    endings: set[asyncio.Task[None]] = field(default_factory=set)
    listeners: dict[tuple[str, int], PortListener] = field(default_factory=dict)
    """By machine and port."""

    def __post_init__(self) -> None:
        self.exposures = Exposures(self.config.host)
        self.transfers = asyncio.Semaphore(self.config.max_transfers)

    def seen(self, report: IsolationReport) -> str:
        """The name of an isolation report, under which clients may ask for it."""
        text = json.dumps(report.as_dict(), sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.reports[name] = report
        return name


def service_of(request: HTTPConnection) -> SandboxService:
    service: SandboxService = request.app.state.service
    return service


def holder_of(request: HTTPConnection) -> Holder:
    """Whose token the request came with."""
    holder: Holder = request.state.holder
    return holder


def client_of(request: HTTPConnection) -> str:
    """Who sent it, for the lease; empty when it wants none."""
    return request.headers.get(CLIENT_HEADER, "")[:64]


def key_of(request: HTTPConnection, *scope: str) -> str | None:
    """Its idempotency key, within its token and `scope`; None when it has none."""
    key = request.headers.get(KEY_HEADER)
    return "/".join((holder_of(request).name, *scope, key)) if key else None


def record_of(request: HTTPConnection) -> MachineRecord:
    """The running machine that the path names."""
    return service_of(request).register.running(holder_of(request), request.path_params["id"])


def known_record_of(request: HTTPConnection) -> MachineRecord:
    """The same of one that may have ended."""
    return service_of(request).register.find(holder_of(request), request.path_params["id"])
