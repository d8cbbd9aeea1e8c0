"""Root's template takes users that are nobody's, each for one clone at a time, and can be root no more."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from mettle.sandbox import MachinePool, SandboxConfig, SandboxPool, StdioTest
from mettle.sandbox.zygote import host_users, kernel, seccomp
from mettle.sandbox.zygote.host_users import BLOCK, HostUsers, IdBlock

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become other users")
in_a_loop = pytest.mark.asyncio(loop_scope="module")
WHO = StdioTest("", "")
ASK = "print(open('/proc/self/uid_map').read().split()[1])"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pools(_needs_isolation: None) -> AsyncIterator[tuple[SandboxPool, MachinePool]]:
    async with SandboxPool(SandboxConfig(warm=1)) as judge, MachinePool(SandboxConfig()) as machines:
        if not (layer := machines.isolation.layer("own-host-user")).is_in_force:
            pytest.skip(layer.detail)
        yield judge, machines


@in_a_loop
async def test_each_cell_and_machine_is_another_user_of_the_host(pools: tuple[SandboxPool, MachinePool]) -> None:
    judge, machines = pools
    first = SandboxConfig().first_host_uid
    results = await asyncio.gather(*(judge.judge(ASK, [WHO]) for _ in range(6)))
    made = [await machines.create() for _ in range(4)]
    found = [int(result.tests[0].stdout) for result in results]
    found += [int((await machine.exec("cat /proc/self/uid_map")).stdout.split()[1]) for machine in made]
    for machine in made:
        await machine.delete()
    assert len(set(found)) == 10, found
    assert min(found) >= first


@in_a_loop
async def test_all_processes_of_it_are_that_user_and_the_template_another(
    pools: tuple[SandboxPool, MachinePool],
) -> None:
    machine = await pools[1].create()
    await machine.start("sleep 60")
    user = int((await machine.exec("cat /proc/self/uid_map")).stdout.split()[1])
    theirs = [pid for pid in filter(str.isdigit, os.listdir("/proc")) if _users(pid) == {user}]
    assert len(theirs) >= 3, "process 1, a worker, sleep"
    assert _users(str(pools[1].template_pid)) == {SandboxConfig().host_uid}
    await machine.delete()


def _status(pid: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return []


def _users(pid: str) -> set[int]:
    lines = _status(pid)
    return {int(word) for line in lines if line.startswith(("Uid:", "Gid:")) for word in line.split()[1:]}


@in_a_loop
async def test_the_template_keeps_three_rights_and_can_be_root_no_more(pools: tuple[SandboxPool, MachinePool]) -> None:
    lines = _status(str(pools[0].template_pid))
    held = dict(line.split()[:2] for line in lines if line.startswith(("Cap", "Sec", "NoNew")))
    assert (int(held["CapEff:"], 16), int(held["CapPrm:"], 16)) == (0b1110_0000, 0b1110_0000), "KILL, SETGID, SETUID"
    assert (held["NoNewPrivs:"], held["Seccomp:"]) == ("1", "2")


@pytest.mark.parametrize(
    ("change", "is_allowed"),
    [
        (lambda: os.setresuid(70_000, 70_000, 70_000), True),
        (lambda: os.setresgid(74_095, 74_095, -1), True),
        (lambda: os.setresuid(64_113, -1, -1), True),
        (lambda: os.setresuid(0, 0, 0), False),
        (lambda: os.setresuid(70_000, 0, 70_000), False),
        (lambda: os.setresuid(74_096, 74_096, 74_096), False),
        (lambda: os.setresgid(69_999, -1, -1), False),
        (lambda: os.setuid(0), False),
        (lambda: os.setgid(0), False),
        (lambda: os.setreuid(-1, 0), False),
        (lambda: os.setregid(0, -1), False),
        (lambda: os.setgroups([0]), False),
    ],
)
def test_the_filter_lets_it_become_the_users_of_its_block_and_nobody_else(change: object, is_allowed: bool) -> None:
    program = seccomp.build_user_filter((64_113, 1000), 70_000, 4096)
    assert _errno_of(program, change) == (0 if is_allowed else errno.EPERM)


def _errno_of(program: bytes, change: object) -> int:
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            kernel.renounce_new_privileges()
            kernel.install_filter(program)
            change()  # type: ignore[operator]
            status = 0
        except OSError as error:
            status = error.errno or 99
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_two_templates_never_share_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_users, "_claims", [])
    blocks = [host_users._claim_block(3_000_000_000, 3 * BLOCK) for _ in range(4)]
    starts = {block.first for block in blocks if block is not None}
    assert starts == {3_000_000_000 + number * BLOCK for number in range(3)}
    assert blocks[3] is None
    for claim in host_users._claims:
        claim.close()
    assert host_users._claim_block(3_000_000_000, BLOCK - 1) is None


def test_a_user_is_given_again_only_when_its_clone_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = iter(range(10, 100))
    monkeypatch.setattr(host_users, "_become", lambda user: None)
    monkeypatch.setattr(host_users.kernel, "die_with_parent", lambda: None)
    monkeypatch.setattr(host_users.kernel, "clone_process", lambda flags: next(pids))
    users = HostUsers(IdBlock(5000, 3), own=1)
    assert [users.clone(0) for _ in range(3)] == [(10, 5000), (11, 5001), (12, 5002)]
    assert users.clone(0)[1] in (5000, 5001, 5002), "with all of them taken, one is shared"
    users.give_back(11)
    users.give_back(99)
    assert 5001 in [users.clone(0)[1], *users._taken.values()]
