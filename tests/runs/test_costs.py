"""What a life of a run has cost counts every process that works for it, however deep it was started."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mettle.processes.beats import read_beats
from mettle.processes.child import descendants, process_cpu_s
from mettle.runs import costs as module
from mettle.runs.costs import CPU_S, PEAK_BYTES, LifeCosts

MIB = 2**20
GRANDCHILD = (
    "held = bytearray(b'x' * (64 << 20)); t = sum(i * i for i in range(6_000_000)); print('up', flush=True); input()"
)
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {GRANDCHILD!r}])"


@pytest.fixture
def child(tmp_path: Path):
    """A process whose own child holds 64 MiB, and has said so."""
    popen = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert popen.stdout is not None
    assert popen.stdout.readline() == b"up\n"
    yield popen
    popen.communicate(b"\n", timeout=60)


def test_memory_and_time_of_a_grandchild_that_beats_no_heart_are_counted(child, tmp_path):
    [grandchild] = descendants(child.pid)
    costs = LifeCosts(1)
    costs.measure([child.pid], read_beats(tmp_path).values())
    assert costs.figures()[PEAK_BYTES] > 64 * MIB
    assert costs.figures()[CPU_S] >= process_cpu_s(grandchild) > 0


def test_a_grandchild_that_its_parent_has_waited_for_counts_once(child, tmp_path):
    costs = LifeCosts(1)
    costs.measure([child.pid], [])
    [grandchild] = descendants(child.pid)
    before = process_cpu_s(grandchild)
    child.stdin.write(b"\n")
    child.stdin.flush()
    deadline = time.monotonic() + 60
    while child.poll() is None:  # waited for: its time, and that of its own child, is in ours
        assert time.monotonic() < deadline
        time.sleep(0.01)
    costs.ended(child.pid, is_killed=False)
    costs.measure([], [])
    assert costs.figures()[CPU_S] < 2 * before


def test_what_is_gone_has_no_descendants():
    popen = subprocess.Popen([sys.executable, "-c", ""])
    popen.wait(timeout=60)
    assert descendants(popen.pid) == []


def test_memory_is_looked_at_often_at_first_and_seldom_later(monkeypatch):
    now, looks = [0.0], []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(module, "process_memory_bytes", lambda pid: looks.append(now[0]) or 0)
    costs = LifeCosts(1)
    for tenth in range(400):
        now[0] = tenth / 10
        costs.measure([], [])
    assert [look for look in looks if look < 12] == pytest.approx([0, 0.5, 1, 2, 4, 8], abs=0.11)
    assert {round(later - earlier, 1) for earlier, later in itertools.pairwise(looks[5:])} == {5.0}
