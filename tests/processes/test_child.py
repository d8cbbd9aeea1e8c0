"""A child process ends with its parent, with what it has started, and is told how."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from mettle.processes.child import (
    ChildProcess,
    explain_exit,
    how_it_ended,
    is_alive,
    last_line,
    process_memory_bytes,
    python_module,
)

PARENT = """
import sys, time
from mettle.processes.child import ChildProcess
child = ChildProcess([sys.executable, "-c", {source!r}], tie={tie!r})
print(child.pid, flush=True)
time.sleep(60)
"""
WATCHING = "from mettle.processes.orphans import end_with_parent; end_with_parent()\nwhile True: pass"
UNAWARE = "while True: pass"


@pytest.mark.parametrize(("tie", "source"), [("thread", UNAWARE), ("pipe", WATCHING)])
def test_no_child_outlives_a_parent_that_is_killed(tie, source):
    script = PARENT.format(source=source, tie=tie)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        time.sleep(0.3)
        parent.kill()
    deadline = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < deadline, "it outlived its parent"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_child_that_does_not_listen_is_killed_with_what_it_has_started(tmp_path):
    source = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    child = ChildProcess([sys.executable, "-c", source], tie="thread", output=tmp_path / "out")
    while not (tmp_path / "out").read_text().endswith("\n"):
        time.sleep(0.02)
    grandchild = int((tmp_path / "out").read_text())
    child.end(grace_s=0.2)
    assert how_it_ended(child.wait(0.0) or 0) == "was ended by SIGKILL"
    deadline = time.monotonic() + 60
    while is_running(grandchild):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.end()


def test_one_that_is_asked_to_end_and_does_is_not_killed():
    child = ChildProcess([sys.executable, "-c", "import time; time.sleep(60)"], tie="thread")
    assert child.exit_code() is None
    assert process_memory_bytes(child.pid) > 0
    child.end(grace_s=10.0)
    assert child.exit_code() == -signal.SIGTERM
    assert process_memory_bytes(child.pid) == 0


def test_pipes_are_closed_and_the_environment_is_added_to():
    before = len(os.listdir("/proc/self/fd"))
    source = "import os, sys; sys.stdout.write(sys.stdin.readline() + os.environ['ADDED'])"
    child = ChildProcess([sys.executable, "-c", source], tie="pipe", has_pipes=True, environment={"ADDED": "there"})
    child.stdin.write(b"hello ")
    child.stdin.close()
    assert child.stdout.read() == b"hello there"
    child.kill()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_cannot_be_started_leaves_nothing_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="nowhere"):
        ChildProcess([str(tmp_path / "nowhere")], tie="pipe")
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_end_in_words(tmp_path):
    assert explain_exit("it", 3, "no memory") == "it ended with exit code 3: no memory"
    assert explain_exit("it", -9, "") == "it was ended by SIGKILL"
    output = tmp_path / "out"
    assert last_line(output) == ""
    output.write_bytes(b"first\n" + b"x" * 9000 + b"\nlast \xff\n\n")
    assert last_line(output) == "last \ufffd"
    reason = "error: no such model\n"
    output.write_text(
        f"{reason}a.py:3: RuntimeWarning: coroutine 'f' was never awaited\n  f()\nRuntimeWarning: Enable it\n"
    )
    assert last_line(output) == "error: no such model"
    child = ChildProcess(python_module("timeit", "--no-such-option"), tie="thread", output=output)
    assert child.wait(100.0) == 2
    assert "no-such-option" in child.tail()


def test_who_has_a_pid_is_told_from_who_had_it_and_from_nobody(monkeypatch):
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert [is_alive(pid) for pid in (os.getpid(), ended.pid, None, 0, -1)] == [True, False, None, None, None]

    def of_another_user(pid, number):
        raise PermissionError

    monkeypatch.setattr(os, "kill", of_another_user)
    assert is_alive(ended.pid)
