"""Hostile code in a machine: neither the host nor another machine feels it, and the same checks fail without isolation."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from arena import MACHINE_LIMITS as LIMITS
from arena import a_sixth, attack_from_machine, broken, open_plant, traces_of_machine
from attack import Attack
from machine_attacks import NEIGHBOUR, OWN, SHARED
from neighbours import Neighbour
from planted import Planted

from mettle.sandbox import MachineConfig, MachinePool

pytestmark = pytest.mark.asyncio(loop_scope="module")


def processes_named(name: str) -> list[int]:
    """Processes of this host, of whatever namespace, that call themselves so."""
    found = []
    for comm in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if comm.read_text().strip() == name:
                found.append(int(comm.parent.name))
    return found


CAN_FAIL = [attack for attack in OWN if attack.gets_through(is_root=os.geteuid() == 0)]


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[Planted]:
    with open_plant(tmp_path) as things:
        yield things


@pytest.mark.parametrize("attack", [*SHARED, *OWN], ids=lambda attack: attack.name)
async def test_the_host_feels_nothing(machines: MachinePool, planted: Planted, attack: Attack) -> None:
    assert await traces_of_machine(machines, attack, planted) == []


@pytest.mark.parametrize("attack", a_sixth(CAN_FAIL))
async def test_gets_through_without_isolation(unsafe_machines: MachinePool, planted: Planted, attack: Attack) -> None:
    """Proof that each check above can fail (all at night); those on cells have theirs beside the judge's."""
    assert await traces_of_machine(unsafe_machines, attack, planted) != []


@pytest_asyncio.fixture(loop_scope="module")
async def neighbour(machines: MachinePool) -> AsyncIterator[Neighbour]:
    found = await Neighbour.move_in(await machines.create())
    yield found
    await found.move_out()


@pytest_asyncio.fixture(loop_scope="module")
async def unsafe_neighbour(unsafe_machines: MachinePool) -> AsyncIterator[Neighbour]:
    found = await Neighbour.move_in(await unsafe_machines.create())
    yield found
    await found.move_out()


@pytest.mark.parametrize("attack", NEIGHBOUR, ids=lambda attack: attack.name)
async def test_another_machine_feels_nothing(machines: MachinePool, neighbour: Neighbour, attack: Attack) -> None:
    machine = await machines.create(LIMITS)
    result = await attack_from_machine(machine, attack, neighbour.described)
    await machine.delete()
    assert "BREACH" not in result.stdout, result.stdout
    assert broken(result.stderr) == []
    assert await neighbour.is_unharmed()


@pytest.mark.parametrize("attack", a_sixth(NEIGHBOUR))
async def test_another_machine_is_reached_without_isolation(
    unsafe_machines: MachinePool, unsafe_neighbour: Neighbour, attack: Attack
) -> None:
    machine = await unsafe_machines.create(LIMITS)
    result = await attack_from_machine(machine, attack, unsafe_neighbour.described)
    await machine.delete()
    assert "BREACH" in result.stdout, result


async def test_a_fork_bomb_ends_at_its_deadline_and_leaves_the_machine_usable(machines: MachinePool) -> None:
    machine = await machines.create(LIMITS)
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    async with asyncio.timeout(100):
        result = await machine.exec(["python3", "-c", bomb], timeout_s=1.0)
    assert result.is_timed_out
    listing = await machine.exec("ls /proc | grep -c '^[0-9]'")
    assert int(listing.stdout) <= 6, "1, its hand, sh, ls, grep"
    await machine.delete()


async def test_nothing_of_a_fork_bomb_is_left_when_its_machine_is_deleted(machines: MachinePool) -> None:
    machine = await machines.create(LIMITS)
    name = f"bomb{machine.id[-8:]}"
    bomb = f"""
import ctypes, os, signal
ctypes.CDLL(None).prctl(15, {name.encode()!r})  # PR_SET_NAME, which forks inherit
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    try: os.fork()
    except OSError: pass
"""
    await machine.start(["python3", "-c", bomb])
    async with asyncio.timeout(60):
        while len(processes_named(name)) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await machine.delete()
    assert processes_named(name) == []


async def test_a_process_that_keeps_changing_into_another_is_caught(machines: MachinePool) -> None:
    machine = await machines.create(LIMITS)
    comet = "import os\nwhile True:\n    if os.fork() == 0: os.setsid()\n    else: os._exit(0)"
    parent = f"import os, time\nif os.fork() == 0: exec({comet!r})\ntime.sleep(60)"
    result = await machine.exec(["python3", "-c", parent], timeout_s=0.5)
    assert result.is_timed_out
    shown = await machine.exec("ls /proc | grep -c '^[0-9]'")
    assert int(shown.stdout) <= 6
    await machine.delete()


async def test_a_full_disk_is_the_machines_own(machines: MachinePool) -> None:
    full, other = await machines.create(LIMITS), await machines.create(LIMITS)
    bomb = "for f in /work/a /tmp/a /dev/shm/a /a; do head -c 40m /dev/zero > $f; done"
    result = await full.exec(bomb)
    assert "No space left" in result.stderr
    with pytest.raises(OSError, match="No space left"):
        await full.upload("more", b"x" * (1 << 20))
    assert (await full.exec("rm /work/a /tmp/a /dev/shm/a /a; echo 1 > b; cat b")).stdout == "1\n"
    assert (await other.exec("head -c 20m /dev/zero > a; wc -c < a")).stdout == f"{20 << 20}\n"
    for machine in (full, other):
        await machine.delete()


async def test_no_exit_code_is_forged_by_ending_the_worker(machines: MachinePool) -> None:
    machine = await machines.create(LIMITS)
    assert (await machine.exec("kill -9 $PPID; exit 0")).exit_code == 137
    assert (await machine.exec("kill -STOP $PPID; exit 0", timeout_s=0.5)).is_timed_out
    assert (await machine.exec("kill -9 1; kill -9 -1; exit 0")).exit_code == 137
    assert (await machine.exec("echo fine")).stdout == "fine\n"
    await machine.delete()


async def test_a_transfer_that_is_interfered_with_fails_and_says_so(machines: MachinePool) -> None:
    machine = await machines.create(LIMITS)
    hunt = "while True:\n    for p in range(os.getpid() + 1, os.getpid() + 200):\n        try: os.kill(p, 9)\n        except OSError: pass"
    hunter = await machine.start(["python3", "-c", f"import os\nprint(1, flush=True)\n{hunt}"])
    while not (await hunter.output()).stdout:  # noqa: ASYNC110
        await asyncio.sleep(0.02)

    async def upload_again_and_again() -> None:
        for _ in range(50):
            await machine.upload("x", b"x" * 3_000_000)

    with pytest.raises(OSError, match=r"ended by a process of the machine"):
        await upload_again_and_again()
    await hunter.kill()
    await machine.delete()


async def test_files_that_the_code_has_prepared_do_not_lead_out(
    machines: MachinePool, planted: Planted, tmp_path: Path
) -> None:
    machine = await machines.create(LIMITS)
    secret = tmp_path / "secret"
    await machine.exec(
        f"mkdir -p {tmp_path}; ln -s {secret} link; ln -s {tmp_path} directory; ln -s / root; ln -s /proc/1/root host"
    )
    for path in ("link", f"root{secret}", f"host{secret}", f"../../..{secret}", "directory/secret"):
        with pytest.raises(OSError, match=r"."):
            await machine.download(path)
    for path in ("directory/new", f"root{tmp_path}/new"):
        await machine.upload(path, b"written inside")
    assert (await machine.exec(f"cat {tmp_path}/new")).stdout == "written inside"
    await machine.delete()
    assert planted.damage() == []


async def test_code_cannot_put_modules_in_the_way_of_the_machines_own(machines: MachinePool) -> None:
    machine = await machines.create(LIMITS)
    found = await machine.exec(["python3", "-c", "import json; print(json.__file__)"])
    top = Path(*Path(found.stdout).parts[:2])
    await machine.exec(f"mv {top} /moved; mkdir -p {Path(found.stdout).parent}")
    await machine.upload("file", b"1")
    assert await machine.download("file") == b"1"
    assert (await machine.snapshot()).data
    await machine.delete()


async def test_a_snapshot_of_files_with_holes_does_not_fill_the_owners_memory(machines: MachinePool) -> None:
    """Files with holes have any size and take no room, and an archive of them has all of it."""
    machine = await machines.create(MachineConfig(disk_mb=2))
    made = await machine.exec("for n in $(seq 500); do truncate -s 2M hole$n || exit 1; done")
    assert made.exit_code == 0, made.stderr
    with pytest.raises(OSError, match="over") as caught:
        await machine.snapshot()
    assert caught.value.errno == errno.EFBIG
    await machine.exec("rm hole*; echo kept > file; truncate -s 1M hole")
    again = await machines.create(snapshot=await machine.snapshot())
    assert (await again.exec("cat file; stat -c %s hole")).stdout == "kept\n1048576\n"
    for one in (machine, again):
        await one.delete()
