"""One service as its client sees it."""

from __future__ import annotations

import asyncio

import pytest

from mettle.sandbox.service.client.access import ServiceAccess
from mettle.sandbox.service.client.connection import ServiceConnection
from mettle.sandbox.service.faults import ServiceLost


async def test_a_service_may_be_declared_lost_twice_at_once() -> None:
    heard = asyncio.Event()
    server = await asyncio.start_server(lambda *_: heard.set(), "127.0.0.1", 0)
    connection = ServiceConnection(
        f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", ServiceAccess(None, None, False), "c"
    )
    asking = asyncio.create_task(connection.ask("GET", "/status"))
    await heard.wait()
    connection.declare_lost()
    await asyncio.sleep(0)
    connection.declare_lost()
    with pytest.raises(ServiceLost):
        await asking
    await connection.close()
    server.close()
