"""Which clock ends a test: processor time decides, and the wall only guards against code that sleeps."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from mettle.sandbox import SandboxPool, StdioTest, Verdict
from mettle.sandbox.zygote import attempt as attempts
from mettle.sandbox.zygote import watch
from mettle.sandbox.zygote.attempt import WALL_FACTOR, Child, RunAttempt
from mettle.sandbox.zygote.processor import ProcessorTime
from mettle.sandbox.zygote.settings import Settings
from mettle.sandbox.zygote.unshared import UnsharedBuffer

LOOK_S = 0.02
SETTINGS = Settings(
    control_fd=-1,
    owner_pid=0,
    is_jailed=False,
    is_landlocked=False,
    host_uid=0,
    max_processes=8,
    max_open_files=64,
    max_file_bytes=1 << 20,
    disk_bytes=1 << 20,
    max_disk_files=64,
    scratch="",
    packages=(),
    preload=(),
    host_paths=(),
)


class Host:
    """A host whose processor, clock and processes do as they are told; `RunAttempt` looks at it every 20 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, job: socket.socket) -> None:
        self.now, self.cpu_s, self.is_runnable = 100.0, 0.0, True
        monkeypatch.setattr(attempts, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(RunAttempt, "_pids", lambda _: [])
        monkeypatch.setattr(watch, "is_runnable", lambda pids: self.is_runnable)
        monkeypatch.setattr(watch, "resident_bytes", lambda *a: 0)
        monkeypatch.setattr(ProcessorTime, "look", lambda *a: self.cpu_s)
        header = {"mode": "stdio", "run": 0, "is_live": False, "wall_s": 3.0, "cpu_s": 1.0}
        child = Child(os.getpid(), -1, job, -1, -2, -3, -4, 0.0, 0)
        limits = {"memory_bytes": 1 << 30, "output_bytes": 1 << 10}
        self.attempt = RunAttempt(
            child, {**header, **limits}, memoryview(b""), [UnsharedBuffer() for _ in range(3)], SETTINGS
        )

    def run(self, wall_s: float, *, share: float, is_runnable: bool) -> str:
        """Let time pass in which the test gets this share of a processor; how it has ended, if it has."""
        self.is_runnable = is_runnable
        for _ in range(round(wall_s / LOOK_S)):
            self.now += LOOK_S
            self.cpu_s += LOOK_S * share
            self.attempt._check_limits()
            if self.attempt.ended:
                break
        return self.attempt.ended


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with socket.socket() as job:
        yield Host(monkeypatch, job)


def test_waiting_for_a_busy_host_is_not_counted(host: Host) -> None:
    assert host.run(20.0, share=0.04, is_runnable=True) == ""  # 0.8 s of processor in 20 s


def test_processor_time_ends_code_however_slowly_it_gets_it(host: Host) -> None:
    assert host.run(29.0, share=0.05, is_runnable=True) == "cpu"
    assert 19.5 < host.now - 100 < 20.5


def test_a_sleeper_is_ended_at_the_wall_limit(host: Host) -> None:
    assert host.run(29.0, share=0.0, is_runnable=False) == "wall"
    assert 2.9 < host.now - 100 < 3.1


def test_sleep_and_processor_count_together_and_waiting_does_not(host: Host) -> None:
    assert host.run(2.0, share=0.0, is_runnable=False) == ""
    assert host.run(8.0, share=0.1, is_runnable=True) == ""
    assert host.run(1.0, share=0.0, is_runnable=False) == "wall"


def test_code_that_never_gets_a_processor_is_ended_all_the_same(host: Host) -> None:
    assert host.run(99.0, share=0.0, is_runnable=True) == "wall"
    assert host.now - 100 == pytest.approx(3 * WALL_FACTOR, abs=0.1)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import time; time.sleep(60)", "wall"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "wall"),
        ("import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()", "processor"),
        ("import os\nif os.fork(): os.wait()\nwhile True: pass", "processor"),
    ],
)
async def test_who_sleeps_and_who_computes_is_told_apart(pool: SandboxPool, code: str, words: str) -> None:
    [result] = (await pool.judge(code, [StdioTest()], timeout_s=0.2)).tests
    assert (result.verdict, words in result.detail) == (Verdict.TIMEOUT, True), result
