"""The lock of a run: one supervisor at a time, and one that was killed has to be gone before the next."""

import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest

from mettle.errors import UserError
from mettle.processes.child import is_ending
from mettle.runs.lock import RunLock, supervisor_pid
from mettle.storage.run_dir import RunDir


class Holder:
    """A supervisor, as the kernel and the lock's file show it. Asked `looks` times whether it ends, it has ended."""

    pid = 2**22 + 5

    def __init__(self, run_dir, looks=0):
        self.looks = looks
        self.handle = os.open(run_dir.path / "supervisor.lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(self.handle, fcntl.LOCK_EX)
        os.pwrite(self.handle, json.dumps({"pid": self.pid, "host": "here"}).encode(), 0)

    def is_ending(self, pid):
        assert pid == self.pid
        self.looks -= 1
        if self.looks == 0:
            os.close(self.handle)
        return True


def test_who_resumes_right_after_a_kill_waits_until_the_killed_one_is_gone(tmp_path):
    run_dir = RunDir(tmp_path)
    holder = Holder(run_dir, looks=3)
    with RunLock(run_dir, is_ending=holder.is_ending):
        assert supervisor_pid(run_dir) == os.getpid()
    assert holder.looks == 0


def test_one_that_lives_is_named_and_not_waited_for(tmp_path):
    run_dir = RunDir(tmp_path)
    holder = Holder(run_dir)
    with pytest.raises(UserError, match=rf"is already running \(pid {holder.pid}\); `mettle rl stop"):
        RunLock(run_dir, is_ending=lambda pid: False).__enter__()
    os.close(holder.handle)


def test_a_lock_given_up_between_two_looks_is_taken(tmp_path, monkeypatch):
    run_dir = RunDir(tmp_path)
    holder = Holder(run_dir)

    def look(run_dir):
        os.close(holder.handle)

    monkeypatch.setattr("mettle.runs.lock.supervisor_pid", look)
    with RunLock(run_dir):
        pass


def test_a_killed_process_is_ending_until_it_is_waited_for_and_a_living_one_is_not():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert not is_ending(child.pid)
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is there as what nobody has waited for
        assert is_ending(child.pid)
    assert not is_ending(child.pid)
