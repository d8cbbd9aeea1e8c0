"""Ports of a machine: from the owner to a server inside, and from inside to the owner."""

from __future__ import annotations

import asyncio

import pytest

from mettle.errors import UserError
from mettle.sandbox.protocols import Machine
from mettle.sandbox.testing.fixtures import MachineFixture


class PortContract(MachineFixture):
    """`connect` and `listen`."""

    async def test_a_server_inside_is_reached_through_connect(self, machine: Machine) -> None:
        await machine.exec("echo found > index")
        serve = (
            "import http.server as h, sys\n"
            "server = h.ThreadingHTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler)\n"
            "print(server.server_port, flush=True); server.serve_forever()"
        )
        job = await machine.start(["python3", "-c", serve])
        while not (port := (await job.output()).stdout):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        reader, writer = await asyncio.open_connection(sock=await machine.connect(int(port)))
        writer.write(b"GET /index HTTP/1.0\r\n\r\n")
        assert (await reader.read()).endswith(b"found\n")
        writer.close()
        await job.kill()
        with pytest.raises(ConnectionRefusedError):
            await machine.connect(int(port))

    async def test_a_program_inside_reaches_a_listener_of_the_host(self, machine: Machine) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"you said " + await reader.readline())
            await writer.drain()
            writer.close()

        listener = await machine.listen()
        port = listener.getsockname()[1]
        server = await asyncio.start_server(answer, sock=listener)
        async with server:
            code = (
                f"import socket; s = socket.create_connection(('127.0.0.1', {port}));"
                "s.sendall(b'hello\\n'); print(s.makefile().read(), end='')"
            )
            assert (await machine.exec(["python3", "-c", code])).stdout == "you said hello\n"
            with pytest.raises(OSError, match="in use"):
                await machine.listen(port)
        with pytest.raises(UserError, match="no port 99999"):
            await machine.listen(99999)
