"""One service for somebody who comes and goes: machines made here stay until they are deleted or their time is over.

Unlike the pools of this package a `ServiceClient` holds no lease, so that three commands at a terminal can make a
machine, use it, and delete it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.machines.files import fill
from mettle.sandbox.service.client.access import ServiceAccess
from mettle.sandbox.service.client.connection import ServiceConnection
from mettle.sandbox.service.client.machine import RemoteMachine, machine_request
from mettle.sandbox.service.tokens import TOKEN_ENV
from mettle.sandbox.service.wire import unpack


class ServiceClient:
    """Use as `async with ServiceClient(url) as client`. The token is taken from the environment."""

    def __init__(
        self, url: str, token_env: str = TOKEN_ENV, *, ca_file: Path | None = None, plain_http: bool = False
    ) -> None:
        self.url = url
        self._access = ServiceAccess(os.environ.get(token_env), ca_file, plain_http)
        self._access.check(url)
        self._connection: ServiceConnection | None = None

    async def __aenter__(self) -> Self:
        self._connection = ServiceConnection(self.url, self._access, client="")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.connection.close()

    @property
    def connection(self) -> ServiceConnection:
        assert self._connection is not None, "a client is used in an `async with` block"
        return self._connection

    async def create(self, config: MachineConfig, name: str = "") -> RemoteMachine:
        """A machine, with its first files in place; nobody's but the token's."""
        told = await self.connection.ask("POST", "/machines", json={**machine_request(config), "name": name})
        machine = await self._attach(told)
        await fill(machine, config.files)
        return machine

    async def machine(self, machine_id: str) -> RemoteMachine:
        """A machine that is there already. Raises: NoMachine; MachineLost when it has ended."""
        told = await self.show(machine_id)
        machine = await self._attach(told)
        if told["status"] != "running":
            machine.end(str(told["why_ended"]))
            machine.require_alive()
        return machine

    async def show(self, machine_id: str) -> dict[str, Any]:
        """What the service says about a machine, also for a while after it has ended."""
        return await self.connection.ask("GET", f"/machines/{machine_id}")

    async def page(
        self,
        labels: Mapping[str, str] | None = None,
        *,
        status: str | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> dict[str, Any]:
        """`machines`, oldest first, and the `next_cursor` of the rest."""
        params = [("label", f"{name}={value}") for name, value in (labels or {}).items()]
        params += [("limit", str(limit))]
        params += [(name, value) for name, value in (("status", status), ("cursor", cursor)) if value]
        return await self.connection.ask("GET", "/machines", params=params)

    async def machines(
        self, labels: Mapping[str, str] | None = None, *, status: str | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """All of them, page by page."""
        cursor: str | None = None
        while True:
            page = await self.page(labels, status=status, limit=1000, cursor=cursor)
            for machine in page["machines"]:
                yield machine
            cursor = page["next_cursor"]
            if cursor is None:
                return

    async def delete(
        self, ids: Sequence[str] = (), labels: Mapping[str, str] | None = None, *, is_all: bool = False
    ) -> list[str]:
        """End machines; those that have been ended."""
        body = {"ids": list(ids), "labels": dict(labels or {}), "all": is_all}
        deleted: list[str] = (await self.connection.ask("DELETE", "/machines", json=body))["deleted"]
        return deleted

    async def jobs(self, machine_id: str) -> list[dict[str, Any]]:
        """The jobs of a machine, oldest first."""
        jobs: list[dict[str, Any]] = (await self.connection.ask("GET", f"/machines/{machine_id}/jobs"))["jobs"]
        return jobs

    async def job_output(self, machine_id: str, job: str, *, wait_s: float = 0.0) -> dict[str, Any]:
        """`stdout`, `stderr`, and the `result` if it has one; that is waited for so long."""
        params = {"output": "1", "wait_s": f"{wait_s:g}"}
        shown = await self.connection.ask("GET", f"/machines/{machine_id}/jobs/{job}", params=params)
        return {**shown, "result": unpack(shown["result"])}

    async def status(self) -> dict[str, Any]:
        """How busy the service is, and what the token may have."""
        return await self.connection.ask("GET", "/status")

    async def isolation(self) -> dict[str, IsolationReport]:
        """What the service measured, by use: `judge`, `machines`."""
        status = await self.status()
        offered = {use: status[use] for use in ("judge", "machines") if status[use]}
        return {use: await self.connection.report(about["isolation"]) for use, about in offered.items()}

    async def _attach(self, told: dict[str, Any]) -> RemoteMachine:
        report = await self.connection.report(told["isolation"])
        names = ("memory_mb", "disk_mb", "lifetime_s", "idle_s", "labels")
        config = MachineConfig(**{name: told[name] for name in names})
        return RemoteMachine(str(told["id"]), config, report, self.connection)
