"""What the kernel has added up is what a test has used, unless far more was seen to run than anybody answers for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mettle.sandbox import SandboxPool, StdioTest, Verdict
from mettle.sandbox.zygote import processor
from mettle.sandbox.zygote.processor import ProcessorTime

LOOK_S = 0.02
_BURN = """
import ctypes, os, signal, struct, sys, time
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
def child(seconds):
    pid = os.fork()
    if pid == 0:
        burn(seconds); os._exit(0)
    return pid
def until_gone(pid):
    try:
        while True: os.kill(pid, 0); time.sleep(0.0002)
    except OSError: pass
"""
_IGNORED = _BURN + "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
_NO_WAIT = (
    _BURN
    + """
SA_NOCLDWAIT = 2
ctypes.CDLL(None).sigaction(17, struct.pack("@P128siP", 0, b"", SA_NOCLDWAIT, 0), None)
"""
)
EVASIONS = {
    "ignored": _IGNORED + "for _ in range(1000): until_gone(child(0.004))\n",
    "unwaited": _NO_WAIT + "for _ in range(1000): until_gone(child(0.004))\n",
    "long ones": _IGNORED + "for _ in range(40): until_gone(child(0.1))\n",
    "a few of them waited for": _BURN
    + """
for number in range(1000):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN if number % 4 else signal.SIG_DFL)
    pid = child(0.004)
    until_gone(pid) if number % 4 else os.waitpid(pid, 0)
""",
    "waited for": _BURN + "for _ in range(1000): os.waitpid(child(0.004), 0)\n",
    "by a shell": "import os; os.execvp('bash', ['bash', '-c', 'trap \"\" CHLD; for i in $(seq 9999); do "
    "(for j in $(seq 400); do :; done); done'])",
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", EVASIONS)
async def test_time_burned_in_short_children_is_counted(pool: SandboxPool, name: str) -> None:
    [result] = (await pool.judge(EVASIONS[name], [StdioTest()], timeout_s=0.4)).tests
    assert (result.verdict, "processor" in result.detail) == (Verdict.TIMEOUT, True), result
    assert 0.4 < result.cpu_s < 2.0


@pytest.mark.asyncio(loop_scope="module")
async def test_children_that_are_few_or_idle_cost_nothing(pool: SandboxPool) -> None:
    code = _IGNORED + "for _ in range(20): until_gone(child(0.001)); time.sleep(0.02)\n"
    [result] = (await pool.judge(code, [StdioTest()], timeout_s=2)).tests
    assert result.has_passed, result
    assert result.cpu_s < 1.0


class Host:
    """A host whose processes have the clocks that a test gives them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clocks: dict[int, float] = {1: 0.0}
        self.waited: dict[int, float] = {}
        self.runnable: set[int] = set()
        self.share, self.now = 1.0, 0.0
        monkeypatch.setattr(
            processor, "watch", SimpleNamespace(process_cpu_s=self.clocks.get, num_runnable=self.is_runnable)
        )
        monkeypatch.setattr(processor, "_waited_for_s", lambda pid: self.waited.get(pid, 0.0))
        monkeypatch.setattr(processor, "_share", lambda: self.share)
        self.time = ProcessorTime(0.0, 0.0)

    def is_runnable(self, pid: int) -> int:
        return int(pid in self.runnable)

    def look(self) -> float:
        self.now += LOOK_S
        return self.time.look(list(self.clocks), self.now)

    def replace_child(self, pid: int, clock_s: float) -> None:
        for gone in [other for other in self.clocks if other != 1]:
            del self.clocks[gone]
        self.clocks[pid] = clock_s
        self.runnable = {pid}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_one_child_after_another_that_nobody_waits_for_counts_as_seen(host: Host) -> None:
    for number in range(100):
        host.replace_child(2 + number, 0.001)
        used_s = host.look()
    assert used_s == pytest.approx(100 * LOOK_S, rel=0.1)
    assert host.time.total(0.01) == pytest.approx(100 * LOOK_S, rel=0.1)


def test_those_that_are_waited_for_count_as_the_kernel_says(host: Host) -> None:
    for number in range(100):
        host.replace_child(2 + number, 0.001)
        host.waited[1] = number * LOOK_S * 0.7
        used_s = host.look()
    assert used_s == pytest.approx(99 * LOOK_S * 0.7, abs=0.01)


def test_a_host_without_a_free_processor_is_not_held_against_them(host: Host) -> None:
    host.share = 0.05
    for number in range(100):
        host.replace_child(2 + number, 0.001)
        host.waited[1] = number * 0.001
        used_s = host.look()
    assert used_s < 0.15


def test_a_long_process_that_nobody_waited_for_keeps_what_it_was_seen_to_use(host: Host) -> None:
    host.clocks[2] = 0.0
    for _ in range(100):
        host.clocks[2] += LOOK_S
        host.look()
    del host.clocks[2]
    assert host.look() == pytest.approx(2.0, abs=0.05)
