"""What a soak does with machines: short lives with files and snapshots, jobs, ports, streams, floods, hogs, idle ends.

Each scenario makes its machines and deletes them, or leaves the end to their own limits. Invariant: a scenario that is
cancelled or fails deletes what it has made, so that whatever is left over was left by the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from mettle.sandbox import Machine, MachineConfig, MachinePool

SMALL = MachineConfig(memory_mb=128, disk_mb=32, max_processes=32, files={"main.py": "print(6 * 7)"})
DEEP_TREE = (
    "for i in 1 2 3; do (setsid sh -c 'trap \"\" TERM; (sleep 500 & sleep 500) & sleep 500' &) ; done; sleep 500"
)
_HOG = "python3 -c 'x = bytearray(1 << 30)'"
_SERVER = (
    "import socket; s = socket.socket(); s.setsockopt(1, 2, 1); s.bind(('127.0.0.1', 8000)); s.listen()\n"
    "print('up', flush=True)\nwhile True:\n    c, _ = s.accept(); c.sendall(b'hello'); c.close()"
)
_CALLER = "import socket; print(socket.create_connection(('127.0.0.1', 9000)).recv(9).decode())"


@contextlib.asynccontextmanager
async def borrowed(pool: MachinePool, config: MachineConfig = SMALL, **options: object) -> AsyncIterator[Machine]:
    """A machine, deleted at the end."""
    machine = await pool.create(config, **options)  # type: ignore[arg-type]
    try:
        yield machine
    finally:
        await asyncio.shield(machine.delete())


async def short_life(pool: MachinePool) -> None:
    async with borrowed(pool) as machine:
        assert (await machine.exec(["python3", "main.py"])).stdout == "42\n"
        await machine.upload("/app/data", bytes(100_000))
        assert len(await machine.download("/app/data")) == 100_000
        assert [entry.name for entry in await machine.list("/app")] == ["data"]


async def snapshots(pool: MachinePool) -> None:
    async with borrowed(pool) as machine:
        await machine.exec("mkdir a; echo 1 > a/b; ln -s b a/c")
        snapshot = await machine.snapshot()
    async with borrowed(pool, snapshot=snapshot) as again:
        assert (await again.exec("cat a/c")).stdout == "1\n"


async def jobs(pool: MachinePool) -> None:
    """Background jobs with deep trees: one is killed, the others are left to the machine's end."""
    async with borrowed(pool) as machine:
        started = [await machine.start(DEEP_TREE), await machine.start("while echo tick; do sleep 0.02; done")]
        assert await started[0].wait(0.1) is None
        while "tick" not in (await started[1].output()).stdout:  # noqa: ASYNC110 - a program's output, not an event
            await asyncio.sleep(0.02)
        await started[0].kill()


async def ports(pool: MachinePool) -> None:
    async with borrowed(pool) as machine:
        stream = machine.stream(["python3", "-c", _SERVER], timeout_s=20)
        async with stream:
            await anext(aiter(stream))
            connection = await machine.connect(8000)
            with connection:
                assert await asyncio.get_running_loop().sock_recv(connection, 9) == b"hello"
        with await machine.listen(9000) as listener:
            caller = asyncio.create_task(machine.exec(["python3", "-c", _CALLER]))
            answerer = asyncio.create_task(_answer(listener))
            try:  # the caller first: when the machine has ended, nobody calls
                assert (await caller).stdout == "dear\n"
            finally:
                caller.cancel()
                answerer.cancel()
                await asyncio.wait({answerer})


async def _answer(listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    accepted, _ = await loop.sock_accept(listener)
    with accepted:
        await loop.sock_sendall(accepted, b"dear")


async def streams_left_early(pool: MachinePool) -> None:
    async with borrowed(pool) as machine:
        stream = machine.stream("yes")
        async for chunk in stream:
            assert chunk.data
            break
        await stream.aclose()


async def misbehaves(pool: MachinePool) -> None:
    async with borrowed(pool) as machine:
        assert (await machine.exec("sleep 60", timeout_s=0.2)).is_timed_out
        assert (await machine.exec("yes | head -c 3000000")).is_truncated
        assert (await machine.exec(_HOG, timeout_s=10)).exit_code != 0
        await machine.exec(":(){ :|:& };:", timeout_s=0.3)
        assert (await machine.exec("exit 7")).exit_code == 7


async def refused(pool: MachinePool) -> None:
    """Files that cannot be put, commands that are not there, hosts that are not on the list."""
    with contextlib.suppress(OSError):
        async with borrowed(pool, MachineConfig(files={"/proc/1/x": b"1"})):
            raise AssertionError("a file was put into /proc")
    async with borrowed(pool, MachineConfig(memory_mb=128, network={"allow": ["packages.example.org:443"]})) as machine:
        fetch = "import urllib.request; urllib.request.urlopen('https://example.com/')"
        assert "403" in (await machine.exec(["python3", "-c", fetch])).stderr
        assert (await machine.exec(["no-such-command"])).exit_code != 0
        with contextlib.suppress(OSError):
            await machine.download("nothing")


async def ends_by_itself(pool: MachinePool) -> None:
    """One that nobody deletes: idle for a second, with a job that lives on its own."""
    machine = await pool.create(MachineConfig(memory_mb=128, idle_s=1.0, lifetime_s=3.0))
    await machine.exec("setsid sleep 500 & echo 1")


SCENARIOS: Mapping[str, Callable[[MachinePool], Awaitable[None]]] = {
    "a short life": short_life,
    "snapshot and restore": snapshots,
    "background jobs": jobs,
    "ports": ports,
    "a stream left early": streams_left_early,
    "misbehaves": misbehaves,
    "is refused": refused,
    "ends by itself": ends_by_itself,
}
