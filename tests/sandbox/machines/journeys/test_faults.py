"""Machines whose owner, template or process 1 is killed: nothing survives, and whoever waited is told."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from owners import ENVIRONMENT, is_alive, wait_until

from mettle.errors import SandboxError, UserError
from mettle.sandbox import MachineConfig, MachineLost, MachinePool, SandboxConfig
from mettle.sandbox.zygote import watch

OWNER = """
import asyncio, sys
from mettle.sandbox import MachineConfig, MachinePool, SandboxConfig
async def main():
    async with MachinePool(SandboxConfig(backend=sys.argv[1])) as machines:
        for _ in range(3):
            machine = await machines.create(MachineConfig(files={"kept": "1"}))
            await machine.exec("setsid sh -c 'sleep 300 & sleep 300' >/dev/null 2>&1 &")
            await machine.exec("mkdir locked && touch locked/in && chmod 500 locked")
            await machine.start("sleep 300")
        print(machines.template_pid, flush=True)
        await asyncio.sleep(300)
asyncio.run(main())
"""


def mounts() -> int:
    return len(Path("/proc/self/mountinfo").read_text().splitlines())


@pytest.mark.usefixtures("_needs_isolation")
@pytest.mark.parametrize("backend", ["zygote", "unsafe"])
async def test_a_killed_owner_leaves_no_process_mount_or_file(backend: str, tmp_path: Path) -> None:
    num_mounts = mounts()
    owner = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", OWNER, backend],
        stdout=subprocess.PIPE,
        env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
    )
    with owner:
        assert owner.stdout is not None
        template = int(await asyncio.to_thread(owner.stdout.readline))
        # Three machines, each with two hands and three or more sleepers.
        await wait_until(lambda: len(watch.descendants(template)) >= 12)
        family = [template, *watch.descendants(template)]
        owner.kill()
    await wait_until(lambda: not any(is_alive(pid) for pid in family))
    await wait_until(lambda: not os.listdir(tmp_path))
    assert mounts() == num_mounts


@pytest.mark.usefixtures("_needs_isolation")
async def test_a_killed_process_1_ends_its_machine_and_no_other() -> None:
    async with MachinePool(SandboxConfig()) as machines:
        first, second = await machines.create(), await machines.create()
        assert machines.template_pid is not None
        running = asyncio.create_task(first.exec("sleep 300 & sleep 300", timeout_s=300))
        await wait_until(lambda: any(map(watch.descendants, children(machines.template_pid))))
        [busy] = [pid for pid in children(machines.template_pid) if watch.descendants(pid)]
        family = [busy, *watch.descendants(busy)]
        os.kill(busy, signal.SIGKILL)
        with pytest.raises(MachineLost, match=f"machine {first.id} has ended"):
            await running
        assert not first.is_alive
        await wait_until(lambda: not any(is_alive(pid) for pid in family))
        assert (await second.exec("echo fine")).stdout == "fine\n"
        with pytest.raises(SandboxError, match="has ended"):
            await first.exec("true")


@pytest.mark.usefixtures("_needs_isolation")
async def test_after_a_killed_template_new_machines_can_be_made() -> None:
    async with MachinePool(SandboxConfig()) as machines:
        lost = await machines.create()
        running = asyncio.create_task(lost.exec("sleep 300", timeout_s=300))
        await asyncio.sleep(0.1)
        assert machines.template_pid is not None
        os.kill(machines.template_pid, signal.SIGKILL)
        with pytest.raises(MachineLost):
            await running
        assert (await (await machines.create()).exec("echo again")).stdout == "again\n"


@pytest.mark.usefixtures("_needs_isolation")
async def test_a_client_cancelled_while_it_deletes_a_machine_leaves_none() -> None:
    async with MachinePool(SandboxConfig()) as machines:
        one = await machines.create()
        deleting = asyncio.create_task(one.delete())
        await asyncio.sleep(0)
        deleting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await deleting
        assert machines.machines == ()
        assert one.cgroup is None
        template = machines.template_pid
        assert template is not None
        await wait_until(lambda: not watch.live_descendants(template))


CROWD = """
import os
for _ in range(40):
    if os.fork() == 0:
        held = bytearray(os.urandom(4096) * 256)
        while True: pass
print("forked")
"""


@pytest.mark.usefixtures("_needs_isolation")
@pytest.mark.parametrize(
    ("backend", "ending"),
    [
        ("zygote", "deleted"),
        ("zygote", "deleted twice"),
        ("zygote", "process 1 killed before"),
        ("zygote", "process 1 stopped"),
        ("unsafe", "deleted"),  # no pid namespace: the end of process 1 would end nothing else
    ],
)
async def test_when_a_machine_is_deleted_no_process_of_it_is_left(backend: str, ending: str) -> None:
    async with MachinePool(SandboxConfig(backend=backend)) as machines:
        assert machines.template_pid is not None
        one = await machines.create()
        assert (await one.exec(["python3", "-c", CROWD])).stdout == "forked\n"
        [first] = [pid for pid in children(machines.template_pid) if watch.descendants(pid)]
        family = watch.live_descendants(first)
        assert len(family) >= 40
        match ending:
            case "deleted twice":
                await asyncio.gather(one.delete(), one.delete())
            case "process 1 killed before":
                os.kill(first, signal.SIGKILL)
            case "process 1 stopped":
                os.kill(first, signal.SIGSTOP)  # it hears of nothing, and is killed
        await one.delete()
        left = [pid for pid in family if is_alive(pid)]
        assert not left, f"{len(left)} of {len(family)} processes outlived their machine"
        await one.delete()


@pytest.mark.usefixtures("_needs_isolation")
async def test_processes_that_cannot_be_ended_hold_up_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mettle.sandbox.machines.machine._END_S", 0.01)
    monkeypatch.setattr("mettle.sandbox.machines.machine._KILLED_S", 0.01)
    async with MachinePool(SandboxConfig()) as machines:
        one = await machines.create()
        monkeypatch.setattr(one.channel, "gone", asyncio.Event())  # as if one hung in the kernel
        await asyncio.wait_for(one.delete(), 60)
        assert not one.is_alive
        assert machines.machines == ()


@pytest.mark.usefixtures("_needs_isolation")
async def test_a_client_cancelled_as_its_socket_arrives_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MachinePool(SandboxConfig()) as machines:
        one = await machines.create()
        before, deliver = len(os.listdir("/proc/self/fd")), one.channel._deliver
        asking = asyncio.create_task(one.listen())
        monkeypatch.setattr(one.channel, "_deliver", lambda header: (deliver(header), asking.cancel()))
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("_needs_isolation")
async def test_a_closed_pool_leaves_no_process_and_no_descriptor() -> None:
    def open_files() -> int:
        gc.collect()  # what other tests have left to be collected is not this one's
        return len(os.listdir("/proc/self/fd"))

    async def use_and_close() -> None:
        async with MachinePool(SandboxConfig()) as machines:
            made = [await machines.create(MachineConfig(files={"a": b"1"})) for _ in range(5)]
            await asyncio.gather(*(one.exec("sleep 300 & echo 1") for one in made))
            await made[0].delete()
            job = await made[1].start("sleep 300")
            assert machines.template_pid is not None
            family = [machines.template_pid, *watch.descendants(machines.template_pid)]
        with pytest.raises(MachineLost, match="its pool was closed"):
            await job.wait()
        await wait_until(lambda: not any(is_alive(pid) for pid in family))

    await use_and_close()
    before = open_files()
    await use_and_close()
    assert open_files() <= before


@pytest.mark.usefixtures("_needs_isolation")
async def test_nothing_accumulates_over_many_commands_and_machines() -> None:
    async with MachinePool(SandboxConfig()) as machines:
        template = machines.template_pid
        assert template is not None
        kept = await machines.create()

        async def work() -> list[int]:
            for _ in range(10):
                one = await machines.create()
                await one.exec("echo 1 & echo 2")
                await one.delete()
                await kept.exec("true")
                await kept.upload("x", b"1")
            await wait_until(lambda: len(children(template)) == 1)
            gc.collect()  # what other tests have left to be collected is not this one's
            looked_at = [os.getpid(), template, *children(template)] if os.geteuid() == 0 else [os.getpid()]
            return [len(os.listdir(f"/proc/{pid}/fd")) for pid in looked_at]

        before, after = await work(), await work()
        assert all(now <= then for then, now in zip(before, after, strict=True)), (before, after)
        shown = await kept.exec("grep -l . /proc/[0-9]*/stat | wc -l")
        assert int(shown.stdout) <= 6, "the dead have been collected"


async def test_a_pool_that_was_not_started_says_so() -> None:
    with pytest.raises(UserError, match="async with"):
        await MachinePool(SandboxConfig()).create()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
