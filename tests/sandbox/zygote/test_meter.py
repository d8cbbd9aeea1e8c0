"""What a cell's processes use is counted by the kernel, whoever waits for them, and nothing inside can stop it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from mettle.errors import UserError
from mettle.sandbox import SandboxConfig, SandboxPool, StdioTest, Verdict, isolation
from mettle.sandbox.cgroups import Absence, CgroupHome, find_home
from mettle.sandbox.zygote import meter
from mettle.sandbox.zygote.meter import open_meter, why_no_event

# Fewer children than the watch of process 1 would notice: each is gone between two of its looks.
_CHILDREN_S = 0.2
_UNSEEN = """
import ctypes, os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
PR_TASK_PERF_EVENTS_DISABLE = 31
for _ in range(40):
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(PR_TASK_PERF_EVENTS_DISABLE, 0, 0, 0, 0)
        os.setsid()
        end = time.process_time() + 0.005
        while time.process_time() < end: pass
        os._exit(0)
    time.sleep(0.01)
while True:
    try: os.wait()
    except ChildProcessError: break
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["event", "cgroup"])
async def metered(_needs_isolation: None, request: pytest.FixtureRequest) -> AsyncIterator[SandboxPool]:
    if request.param == "event" and why_no_event():
        pytest.skip(f"this host gives this user no such event: {why_no_event()}")
    if request.param == "cgroup":
        found = find_home()
        if isinstance(found, Absence):
            pytest.skip(f"no cgroup of version 2 may be divided by this user: {found.why}")
        assert found.close()
    async with SandboxPool(SandboxConfig(warm=1, cpu_meter=request.param)) as pool:
        yield pool


@pytest.mark.asyncio(loop_scope="module")
async def test_what_unwaited_children_used_is_reported_and_limited(metered: SandboxPool) -> None:
    assert metered.isolation.layer("cpu-meter").is_in_force
    [whole] = (await metered.judge(_UNSEEN, [StdioTest()], timeout_s=5)).tests
    assert whole.has_passed, whole
    assert _CHILDREN_S < whole.cpu_s < 3 * _CHILDREN_S
    [ended] = (await metered.judge(_UNSEEN, [StdioTest()], timeout_s=_CHILDREN_S / 2)).tests
    assert (ended.verdict, "processor" in ended.detail) == (Verdict.TIMEOUT, True), ended


@pytest.mark.asyncio(loop_scope="module")
async def test_each_test_is_counted_for_itself_and_what_it_slept_is_not(metered: SandboxPool) -> None:
    code = "import time\nif input() == 'x':\n    while time.process_time() < 0.4: pass\nelse: time.sleep(0.05)\n"
    tests = (await metered.judge(code, [StdioTest("x"), StdioTest("y"), StdioTest("y")], timeout_s=5)).tests
    assert all(test.has_passed for test in tests)
    assert tests[0].cpu_s > 0.35
    assert max(tests[1].cpu_s, tests[2].cpu_s) < 0.25


@pytest.mark.asyncio(loop_scope="module")
async def test_no_cgroup_of_a_cell_is_left() -> None:
    found = find_home()
    if isinstance(found, Absence):
        pytest.skip(f"no cgroup of version 2 may be divided by this user: {found.why}")
    parent = found._path.parent
    assert found.close()
    ours = f"mettle-{os.getpid()}-*"  # other tests have theirs beside it
    before = set(parent.glob(ours))
    async with SandboxPool(SandboxConfig(warm=1, cpu_meter="cgroup")) as pool:
        await pool.judge("print(1)", [StdioTest()])
        assert set(parent.glob(ours)) > before
    assert set(parent.glob(ours)) <= before


def test_a_cgroup_made_of_files_is_entered_and_read(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = CgroupHome(tmp_path / "home", ())
    real = type(tmp_path).mkdir

    def mkdir(path, *args: object) -> None:
        real(path)
        (path / "cgroup.procs").write_text("")
        (path / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")

    monkeypatch.setattr(type(tmp_path), "mkdir", mkdir)
    made = home.make_for_cell()
    monkeypatch.undo()
    monkeypatch.setattr(meter.time, "process_time", lambda: 1.0)
    opened = open_meter(may_use_event=False, entrances=made.entrances)
    assert opened is not None
    assert (opened.kind, opened.used_s()) == ("cgroup", 1.5)
    assert (tmp_path / "home" / "c-1" / "cgroup.procs").read_text() == "0"


def test_a_meter_that_is_named_and_missing_is_refused_and_one_that_is_not_named_is_graded_down() -> None:
    report = isolation.unisolated(SandboxConfig())
    with pytest.raises(UserError, match="cpu_meter is 'event', and this host does not have it: Permission denied"):
        isolation.with_meter(report, SandboxConfig(cpu_meter="event"), "", "Permission denied", "")
    graded = isolation.with_meter(report, SandboxConfig(), "", "Permission denied", "not mounted here")
    assert not graded.layer("cpu-meter").is_in_force
    assert "Permission denied; cgroup: not mounted here" in graded.layer("cpu-meter").detail
    assert dataclasses.replace(report, layers=graded.layers[:-1]) == report
