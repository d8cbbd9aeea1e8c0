"""Services for tests, in this process or in one of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from owners import ENVIRONMENT

from mettle.sandbox.service.config import ServiceConfig
from mettle.sandbox.service.server import listening
from mettle.sandbox.service.state import SandboxService
from mettle.sandbox.service.tokens import add_token


def settings(tmp: Path, **changes: Any) -> dict[str, Any]:
    """A service's settings, with tokens in `tmp`."""
    return {
        "port": 0,
        "tokens_file": str(tmp / "tokens.json"),
        "spool_dir": str(tmp),
        "grace_s": 2.0,
        **changes,
        "sandbox": {"warm": 2, "timeout_s": 2.0, "memory_mb": 256, **changes.get("sandbox", {})},
    }


@contextlib.asynccontextmanager
async def serving(tmp: Path, **changes: Any) -> AsyncIterator[tuple[SandboxService, str]]:
    """A service in this event loop, and its URL."""
    async with listening(ServiceConfig.model_validate(settings(tmp, **changes))) as (service, url):
        yield service, url


@contextlib.asynccontextmanager
async def service_process(tmp: Path, **changes: Any) -> AsyncIterator[tuple[subprocess.Popen[bytes], str]]:
    """A service in a process of its own, and its URL."""
    command = [sys.executable, "-m", "mettle.sandbox.service", json.dumps(settings(tmp, **changes))]
    environment = {**os.environ, "PYTHONPATH": ENVIRONMENT["PYTHONPATH"], "TMPDIR": str(tmp)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:  # noqa: ASYNC220
        try:
            assert process.stdout is not None
            line = await asyncio.to_thread(process.stdout.readline)
            yield process, json.loads(line)["url"]
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait, 20)


def make_token(tmp: Path, name: str = "tester", **quota: Any) -> str:
    return add_token(tmp / "tokens.json", name, quota)


class ApiCaller:
    """Requests to a service, with a token."""

    def __init__(self, session: aiohttp.ClientSession, url: str, service: SandboxService, home: Path) -> None:
        self.session, self.url, self.service, self.home = session, url, service, home
        self.token = make_token(home, "api")

    async def ask(self, method: str, path: str, *, token: str | None = None, **request: Any) -> tuple[int, Any]:
        given = self.token if token is None else token
        headers = {**({"Authorization": f"Bearer {given}"} if given else {}), **request.pop("headers", {})}
        url = self.url + (path if path.startswith(("/health", "/metrics", "/gw")) else f"/api/v1{path}")
        async with self.session.request(method, url, headers=headers, **request) as response:
            data = await response.read()
            try:
                return response.status, json.loads(data)
            except ValueError:
                return response.status, data

    async def create(self, **body: Any) -> str:
        status, made = await self.ask("POST", "/machines", json=body)
        assert status == 201, made
        return str(made["id"])


async def wait_until(is_so: Callable[[], Awaitable[bool]], timeout_s: float = 100.0) -> None:
    """Look until it is so."""
    async with asyncio.timeout(timeout_s):
        while not await is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
