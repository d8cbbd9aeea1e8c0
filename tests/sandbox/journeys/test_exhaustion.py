"""Whatever one machine or test uses up of what the kernel counts, its neighbours and the owner have their share."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import socket
import subprocess
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from hoards import HOARDS, SHARE, Hoard

from mettle.sandbox import Machine, MachineConfig, MachinePool, SandboxConfig, SandboxPool, StdioTest, Verdict

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHARED = SandboxConfig(num_host_uids=0, warm=1)
ROOMY = MachineConfig(memory_mb=1024, disk_mb=64)
_FULL_PIPE = 1 << 16
_F_GETPIPE_SZ = 1032
_ALONE = (
    "processes",
    "open files",
    "pages of pipes",
    "files in memory",
)  # others of the same machine fail beside these
_HOARDS_OF_TESTS = [hoard for hoard in HOARDS if hoard.name in ("pages of pipes", "descriptors on their way")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def own_users(machines: MachinePool, pool: SandboxPool) -> AsyncIterator[None]:
    for report in (machines.isolation, pool.isolation):
        if not (layer := report.layer("own-host-user")).is_in_force:
            pytest.skip(f"cells and machines share a user of this host: {layer.detail}")
    yield


async def take_all(machine: Machine, hoard: Hoard) -> int:
    """Start it, and how much it holds from now on."""
    job = await machine.start(["python3", "-c", hoard.program])
    while not (found := re.search(r"held (\d+)\n", (output := await job.output()).stdout)):
        assert job.poll() is None, output.stderr
        await asyncio.sleep(0.02)
    return int(found[1])


async def what_is_wrong(pool: SandboxPool, machines: MachinePool) -> list[str]:
    """With a test, with a new machine, and with this process."""
    [result] = (await pool.judge(SHARE, [StdioTest("", "all right")], timeout_s=3)).tests
    found = [] if result.has_passed else [f"a test: {result.verdict} {result.stdout} {result.stderr[-300:]}"]
    neighbour = await machines.create()
    answer = await neighbour.exec(["python3", "-", "machine"], stdin=SHARE, timeout_s=20)
    if answer.stdout != "all right\n":
        found.append(f"a machine: {answer.stdout or answer}")
    (await neighbour.listen(0)).close()
    await neighbour.delete()
    return found + _what_is_wrong_here()


def _what_is_wrong_here() -> list[str]:
    found = []
    reader, writer = os.pipe()
    if fcntl.fcntl(writer, _F_GETPIPE_SZ) != _FULL_PIPE:
        found.append(f"the owner's pipes hold {fcntl.fcntl(writer, _F_GETPIPE_SZ)} bytes")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [reader] * 50)
        for descriptor in (*socket.recv_fds(theirs, 1, 50)[1], reader, writer):
            os.close(descriptor)
    subprocess.run(["true"], check=True)
    return found


@pytest.mark.parametrize(
    "hoard",
    [pytest.param(hoard, marks=() if hoard.is_quick else pytest.mark.nightly) for hoard in HOARDS],
    ids=lambda hoard: hoard.name,
)
async def test_what_one_machine_holds_is_missed_by_nobody(
    own_users: None, machines: MachinePool, pool: SandboxPool, hoard: Hoard
) -> None:
    machine = await machines.create(ROOMY)
    try:
        number = await take_all(machine, hoard)
        assert number >= hoard.least, f"it got only {number}: the check is worth nothing"
        assert number == 0 or hoard.least > 0, f"it got {number} of what is to be refused"
        assert await what_is_wrong(pool, machines) == []
    finally:
        await machine.delete()


@pytest.mark.parametrize("hoard", _HOARDS_OF_TESTS, ids=lambda hoard: hoard.name)
async def test_what_tests_hold_is_missed_by_nobody(
    own_users: None, machines: MachinePool, pool: SandboxPool, hoard: Hoard
) -> None:
    async with asyncio.TaskGroup() as group:
        hoarding = [group.create_task(pool.judge(hoard.program, [StdioTest("", "")], timeout_s=1)) for _ in range(2)]
        await asyncio.sleep(0.5)
        assert await what_is_wrong(pool, machines) == []
    for task in hoarding:
        [result] = task.result().tests
        assert (result.verdict, int(result.stdout.split()[1]) > 100) == (Verdict.TIMEOUT, True), result


@pytest.mark.nightly
async def test_all_at_once_from_several_machines(own_users: None, machines: MachinePool, pool: SandboxPool) -> None:
    made = [await machines.create(ROOMY) for _ in range(6)]
    try:
        for number, machine in enumerate(made):
            for hoard in HOARDS[number % 2 :: 2]:
                if hoard.name not in _ALONE:
                    await take_all(machine, hoard)
        assert await what_is_wrong(pool, machines) == []
    finally:
        for machine in made:
            await machine.delete()


async def test_the_check_fails_where_all_share_one_user(own_users: None) -> None:
    """Pipes of one page each: what was written does not fit, and the neighbour's program waits for ever."""
    async with SandboxPool(SHARED) as pool, MachinePool(SHARED) as machines:
        layer = machines.isolation.layer("own-host-user")
        assert (layer.is_in_force, "num_host_uids is 0" in layer.detail) == (False, True)
        pipe = "import os; r, w = os.pipe(); os.write(w, bytes(32768)); print(len(os.read(r, 99999)))"
        [before] = (await pool.judge(pipe, [StdioTest("", "32768")], timeout_s=0.2)).tests
        machine = await machines.create(ROOMY)
        await take_all(machine, HOARDS[0])
        [result] = (await pool.judge(pipe, [StdioTest("", "32768")], timeout_s=0.2)).tests
        assert (before.verdict, result.verdict) == (Verdict.PASSED, Verdict.TIMEOUT), result
