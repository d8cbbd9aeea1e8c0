"""The allow-list of a machine: what is listed is reached, and nothing else is, however it is asked for. Loopback only."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from owners import wait_until

from mettle.errors import UserError
from mettle.sandbox import Machine, MachineConfig, MachinePool
from mettle.sandbox.machines import egress

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Site:
    """A server of the host's that keeps what it is sent, and answers each connection once."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read(1 << 16)
        self.received.append(data)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        await writer.drain()
        writer.close()


@pytest_asyncio.fixture(loop_scope="module")
async def site() -> AsyncIterator[Site]:
    made = Site()
    server = await asyncio.start_server(made.answer, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    yield made
    server.close()


async def reach(machines: MachinePool, *rules: str) -> Machine:
    return await machines.create(MachineConfig(network={"allow": list(rules)}))


async def send(machine: Machine, request: bytes) -> bytes:
    """What the proxy answers to these bytes, sent from inside."""
    await machine.upload("request", request)
    program = (
        "import socket\ns = socket.create_connection(('127.0.0.1', 3128))\ns.sendall(open('request', 'rb').read())\n"
        "while data := s.recv(65536): print(data.decode('latin1'), end='')\n"
    )
    result = await machine.exec(["python3", "-c", program], timeout_s=10)
    assert result.exit_code == 0, result
    return result.stdout.encode()


async def test_a_listed_host_is_reached_by_programs_that_know_nothing_of_it(machines: MachinePool, site: Site) -> None:
    machine = await reach(machines, f"127.0.0.1:{site.port}")
    program = (
        "import os, urllib.request\nos.environ['no_proxy'] = ''\n"
        f"print(urllib.request.urlopen('http://127.0.0.1:{site.port}/a?b=c', timeout=5).read().decode())\n"
    )
    result = await machine.exec(["python3", "-c", program])
    assert result.stdout == "hello\n", result.stderr
    [request] = site.received
    assert request.startswith(b"GET /a?b=c HTTP/1.1\r\n")
    assert machine.egress is not None
    assert machine.egress.num_bytes_in > 5
    await machine.delete()


async def test_a_tunnel_carries_bytes_both_ways(machines: MachinePool, site: Site) -> None:
    machine = await reach(machines, f"127.0.0.1:{site.port}")
    answer = await send(machine, f"CONNECT 127.0.0.1:{site.port} HTTP/1.1\r\n\r\n\0\1anything".encode())
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"hello")
    assert site.received == [b"\0\1anything"]
    await machine.delete()


@pytest.mark.parametrize(
    "request_text",
    [
        "CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n",
        "CONNECT localhost:{port} HTTP/1.1\r\n\r\n",
        "CONNECT [::ffff:127.0.0.1]:{port} HTTP/1.1\r\n\r\n",
        "GET http://127.0.0.1:{port}/ HTTP/1.1\r\n\r\n",
        "GET http://LOCALHOST.:{port}/ HTTP/1.1\r\n\r\n",
        "GET http://example.com@127.0.0.1:{port}/ HTTP/1.1\r\n\r\n",
        "GET http://127.0.0.1:{port}#@example.com/ HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n",
        "CONNECT 2130706433:{port} HTTP/1.1\r\n\r\n",
        "CONNECT 0x7f000001:{port} HTTP/1.1\r\n\r\n",
        "CONNECT 127.1:{port} HTTP/1.1\r\n\r\n",
        "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: example.com\r\n\r\n",
    ],
)
async def test_what_is_not_listed_is_refused_and_not_a_byte_arrives(
    machines: MachinePool, site: Site, request_text: str
) -> None:
    machine = await reach(machines, "example.com", f"localhost:{site.port + 1}")
    answer = await send(machine, request_text.format(port=site.port).encode())
    assert answer.split()[1] in (b"403", b"400"), answer
    assert site.received == []
    await machine.delete()


async def test_a_name_that_leads_to_this_host_is_refused_unless_the_address_is_listed(
    machines: MachinePool, site: Site
) -> None:
    machine = await reach(machines, f"localhost:{site.port}")
    request = f"CONNECT localhost:{site.port} HTTP/1.1\r\n\r\nx".encode()
    assert b"not a public address" in await send(machine, request)
    assert machine.egress is not None
    assert [refused.host for refused in machine.egress.refusals] == ["localhost"]
    await machine.delete()
    machine = await reach(machines, f"localhost:{site.port}", f"127.0.0.0/8:{site.port}")
    assert (await send(machine, request)).endswith(b"hello")
    await machine.delete()


async def test_a_name_that_changes_its_mind_between_looks_gains_nothing(
    machines: MachinePool, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address that was checked is the one that is connected to: the name is asked for once."""
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[ipaddress.IPv4Address]:
        asked.append(host)
        return [ipaddress.IPv4Address("169.254.169.254" if len(asked) == 1 else "127.0.0.1")]

    monkeypatch.setattr(egress, "_resolve", resolve)
    machine = await reach(machines, f"rebinding.example:{site.port}", f"127.0.0.1:{site.port}")
    request = f"CONNECT rebinding.example:{site.port} HTTP/1.1\r\n\r\nx".encode()
    assert b"169.254.169.254 is not a public address" in await send(machine, request)
    assert asked == ["rebinding.example"]
    assert site.received == []
    await machine.delete()


async def test_a_name_that_leads_to_this_hosts_own_public_address_is_refused(
    machines: MachinePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host with an address of the internet has services there that only its own firewall protects."""

    async def resolve(host: str, port: int) -> list[ipaddress.IPv4Address]:
        return [ipaddress.IPv4Address("8.8.8.8")]

    monkeypatch.setattr(egress, "_resolve", resolve)
    monkeypatch.setattr(egress, "_is_own", lambda address, port: True)
    machine = await reach(machines, "example.com:443")
    assert b"this host's own address" in await send(machine, b"CONNECT example.com:443 HTTP/1.1\r\n\r\n")
    await machine.delete()


async def test_this_hosts_addresses_are_told_from_others() -> None:
    assert egress._is_own(ipaddress.ip_address("127.0.0.1"), 80)
    assert not egress._is_own(ipaddress.ip_address("8.8.8.8"), 80)


async def test_a_machine_that_sends_no_head_is_hung_up_on(
    machines: MachinePool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(egress, "_HEAD_S", 0.05)
    machine = await reach(machines, "example.com")
    assert await send(machine, b"GET http://exam") == b""
    assert not [record for record in caplog.records if record.name == "asyncio"], "nothing was left to the event loop"
    await machine.delete()


async def test_an_answer_that_nobody_takes_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that reads nothing would otherwise keep as many sockets of the owner's open as it likes."""
    monkeypatch.setattr(egress, "_LINGER_S", 0.05)
    ours, theirs = socket.socketpair()
    with theirs:
        _, writer = await asyncio.open_connection(sock=ours)
        writer.write(b"x" * (8 << 20))
        await egress._hang_up(writer)
        await asyncio.sleep(0)
        assert ours.fileno() == -1


async def test_nothing_follows_a_request_but_its_own_body(machines: MachinePool, site: Site) -> None:
    """A second request on the connection, with another Host, would reach a neighbour of the allowed site."""
    machine = await reach(machines, f"127.0.0.1:{site.port}")
    target = f"http://127.0.0.1:{site.port}/"
    smuggled = b"GET / HTTP/1.1\r\nHost: neighbour.example\r\n\r\n"
    body = f"POST {target} HTTP/1.1\r\nHost: neighbour.example\r\nContent-Length: 3\r\n\r\nabc".encode() + smuggled
    assert (await send(machine, body)).endswith(b"hello")
    [request] = site.received
    assert request.endswith(b"\r\n\r\nabc")
    assert request.count(b"Host:") == 1
    assert f"Host: 127.0.0.1:{site.port}".encode() in request
    await machine.delete()


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"Transfer-Encoding: chunked", b"411"),
        (b"Content-Length: 3\r\nContent-Length: 4", b"400"),
        (b"Content-Length: -3", b"400"),
        (b"X: a\rY: b", b"400"),
        (b" folded: 1", b"400"),
        (b"no colon", b"400"),
        (b"X: " + b"a" * 40_000, b"431"),
    ],
)
async def test_a_request_that_two_readers_could_read_differently_is_refused(
    machines: MachinePool, site: Site, header: bytes, status: bytes
) -> None:
    machine = await reach(machines, f"127.0.0.1:{site.port}")
    request = f"POST http://127.0.0.1:{site.port}/ HTTP/1.1\r\n".encode() + header + b"\r\n\r\n"
    assert (await send(machine, request)).split()[1] == status
    assert site.received == []
    await machine.delete()


async def test_there_is_no_way_around_the_proxy(machines: MachinePool, site: Site) -> None:
    machine = await reach(machines, f"127.0.0.1:{site.port}")
    program = (
        "import socket\n"
        f"for to in (('127.0.0.1', {site.port}), ('1.1.1.1', 443), ('169.254.169.254', 80)):\n"
        "    try: socket.create_connection(to, 1); print('BREACH', to)\n"
        "    except OSError as error: print(error.errno)\n"
    )
    result = await machine.exec(["python3", "-c", program])
    assert "BREACH" not in result.stdout, result
    assert len(result.stdout.split()) == 3
    assert site.received == []
    await machine.delete()


async def test_a_machine_that_asked_for_no_network_has_no_proxy(machines: MachinePool) -> None:
    machine = await machines.create()
    assert (await machine.exec("env | grep -ic proxy; cat /proc/net/tcp | wc -l")).stdout == "0\n1\n"
    assert machine.egress is None
    await machine.delete()


async def test_without_isolation_an_allow_list_is_refused(unsafe_machines: MachinePool) -> None:
    with pytest.raises(UserError, match="share the network of this host"):
        await reach(unsafe_machines, "example.com")


async def test_connections_end_with_the_machine(machines: MachinePool, site: Site) -> None:
    async def come_and_go() -> int:
        machine = await reach(machines, f"127.0.0.1:{site.port}")
        hold = f"import socket\ns = socket.create_connection(('127.0.0.1', 3128))\ns.sendall(b'CONNECT 127.0.0.1:{site.port} HTTP/1.1\\r\\n\\r\\n')\nprint(s.recv(99)[:12], flush=True)\ns.recv(1)"
        job = await machine.start(["python3", "-c", hold])
        while "200" not in (await job.output()).stdout:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await machine.delete()
        return len(os.listdir("/proc/self/fd"))

    before = await come_and_go()
    await come_and_go()
    await wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
