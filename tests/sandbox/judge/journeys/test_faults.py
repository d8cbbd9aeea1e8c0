"""Processes that are killed, and hosts that refuse: nothing survives, nothing is lost, and nothing falls back."""

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

from mettle.errors import UserError
from mettle.sandbox import IsolationReport, SandboxConfig, SandboxPool, StdioTest
from mettle.sandbox.zygote import watch


@pytest.fixture
def _isolating_host(host_isolation: IsolationReport) -> None:
    if not host_isolation.is_at_least("ns"):
        pytest.skip("this host cannot isolate code")


@pytest.mark.usefixtures("_isolating_host")
async def test_a_killed_template_takes_its_cells_along_and_another_takes_over() -> None:
    async with SandboxPool(SandboxConfig(warm=2)) as pool:
        running = asyncio.create_task(pool.judge("import time; time.sleep(1); print(1)", [StdioTest("", "1")]))
        first = pool.template_pid
        assert first is not None
        await wait_until(lambda: pool.stats.num_running == 1 and bool(watch.descendants(first)))
        cells = watch.descendants(first)
        os.kill(first, signal.SIGKILL)
        assert (await running).has_passed, "the judgement that was running was not tried again"
        assert pool.template_pid != first
        await wait_until(lambda: not any(is_alive(pid) for pid in cells))
        assert pool.stats.num_templates == 2
        assert (await pool.judge("print(1)", [StdioTest("", "1")])).has_passed


@pytest.mark.usefixtures("_isolating_host")
async def test_a_client_that_is_cancelled_while_a_template_starts_breaks_nothing() -> None:
    async with SandboxPool(SandboxConfig(warm=0)) as pool:
        first = pool.template_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        client = asyncio.create_task(pool.judge("print(1)", [StdioTest("", "1")]))
        await wait_until(lambda: pool.template_pid not in (None, first))
        client.cancel()
        [outcome] = await asyncio.gather(client, return_exceptions=True)
        # On a busy host it may have had its answer before this test saw the new template.
        assert isinstance(outcome, asyncio.CancelledError) or outcome.has_passed
        assert (await pool.judge("print(1)", [StdioTest("", "1")])).has_passed


@pytest.mark.usefixtures("_isolating_host")
async def test_a_pool_without_isolation_leaves_no_files_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with SandboxPool(SandboxConfig(backend="unsafe", warm=1)) as pool:
        code = "import os\nfor _ in range(1100): os.mkdir('d'); os.chdir('d')\nos.kill(os.getppid(), 9)"
        await pool.judge(code, [StdioTest()])
        assert os.listdir(tmp_path)
    assert not os.listdir(tmp_path)


@pytest.mark.usefixtures("_isolating_host")
async def test_a_closed_pool_leaves_no_process() -> None:
    pool = SandboxPool(SandboxConfig(warm=3))
    async with pool:
        template = pool.template_pid
        assert template is not None
        await wait_until(lambda: len(watch.descendants(template)) >= 6)  # three cells with a child each
        family = [template, *watch.descendants(template)]
    await wait_until(lambda: not any(is_alive(pid) for pid in family))
    await pool.close()


OWNER = """
import asyncio, sys
from mettle.sandbox import SandboxConfig, SandboxPool, StdioTest
async def main():
    async with SandboxPool(SandboxConfig(warm=2, backend=sys.argv[1])) as pool:
        task = asyncio.create_task(pool.judge("while True: pass", [StdioTest()], timeout_s=60))
        print(pool.template_pid, flush=True)
        await task
asyncio.run(main())
"""


@pytest.mark.usefixtures("_isolating_host")
@pytest.mark.parametrize("backend", ["zygote", "unsafe"])
async def test_a_killed_owner_leaves_no_process(backend: str, tmp_path: Path) -> None:
    owner = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", OWNER, backend],
        stdout=subprocess.PIPE,
        env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
    )
    with owner:
        assert owner.stdout is not None
        template = int(await asyncio.to_thread(owner.stdout.readline))
        await wait_until(lambda: len(watch.descendants(template)) >= 2)
        family = [template, *watch.descendants(template)]
        owner.kill()
    await wait_until(lambda: not any(is_alive(pid) for pid in family))


@pytest.mark.usefixtures("_isolating_host")
async def test_nothing_accumulates() -> None:
    async with SandboxPool(SandboxConfig(warm=2)) as pool:
        template = pool.template_pid
        assert template is not None

        async def judge_some() -> None:
            for _ in range(30):
                assert (await pool.judge("print(1)", [StdioTest("", "1")])).has_passed

        def is_at_rest() -> bool:
            return pool.stats.num_warm == 2 and len(watch.descendants(template)) == 4

        def open_files(pid: int) -> int:
            return len(os.listdir(f"/proc/{pid}/fd"))

        await judge_some()
        await wait_until(is_at_rest)
        gc.collect()  # what earlier tests of this process have left open may go at any time
        before = open_files(os.getpid()), open_files(template)
        await judge_some()
        await wait_until(is_at_rest)
        await wait_until(lambda: open_files(os.getpid()) <= before[0] and open_files(template) <= before[1])


REFUSED = """
import asyncio, struct, sys
from mettle.errors import UserError
from mettle.sandbox import SandboxConfig, SandboxPool, StdioTest, probe
from mettle.sandbox.zygote import kernel
def deny(number, argument=None):
    # The filter of a container: this call fails (with this first argument, if one is given), all else is allowed.
    allow, refuse = (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)
    program = [(0x20, 0, 0, 0), (0x15, 1, 0, number), allow]
    if argument is not None:
        program += [(0x20, 0, 0, 16), (0x15, 1, 0, argument), allow]
    kernel.renounce_new_privileges()
    kernel.install_filter(b"".join(struct.pack("=HBBI", *line) for line in [*program, refuse]))
def mask_proc():
    # What a container runtime does to /proc, so that the kernel allows no fresh one inside.
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/proc/irq", "tmpfs", kernel.MS_RDONLY)
if sys.argv[1] == "mask":
    mask_proc()
else:
    deny(*map(int, sys.argv[1].split(":")))
print("\\n".join(probe().lines()))
PROGRAM = "import threading; threading.Thread(target=print, args=(1,)).start()"
async def main():
    try:
        async with SandboxPool(SandboxConfig(require=sys.argv[2])) as pool:
            result = await pool.judge(PROGRAM, [StdioTest("", "1")], timeout_s=1)
            print("RAN", result.isolation.grade, result.tests[0])
    except UserError as error:
        print("REFUSED", error)
asyncio.run(main())
"""


def run_where_denied(denied: str, require: str) -> str:
    command = [sys.executable, "-c", REFUSED, denied, require]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


needs_x86_64 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="denied calls are given by x86_64 numbers")


@needs_x86_64
@pytest.mark.usefixtures("_isolating_host")
@pytest.mark.parametrize(
    ("number", "word"), [("272", "unshare"), ("165", "mount"), ("155", "pivot_root"), ("442", "mount_setattr")]
)
def test_a_host_that_denies_a_layer_is_refused_by_name(number: str, word: str) -> None:
    text = run_where_denied(number, "ns")
    assert "RAN" not in text
    assert "grade none" in text
    assert "REFUSED the sandbox must have isolation 'ns' and this host gives 'none'" in text
    assert word in text
    assert "seccomp=mettle.json" in text
    assert 'require = "landlock-only"' in text
    assert "'unsafe'" in text


@needs_x86_64
@pytest.mark.usefixtures("_isolating_host")
def test_a_host_without_seccomp_is_refused_unless_that_was_asked_for() -> None:
    no_seccomp = "157:22"  # prctl(PR_SET_SECCOMP)
    text = run_where_denied(no_seccomp, "ns")
    assert "REFUSED" in text
    assert "this host gives 'ns-noseccomp' (seccomp: the kernel refused the filter [EPERM])" in text
    assert "RAN ns-noseccomp TestResult(verdict=<Verdict.PASSED" in run_where_denied(no_seccomp, "ns-noseccomp")


@needs_x86_64
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mask /proc")
@pytest.mark.usefixtures("_isolating_host")
def test_a_container_that_masks_proc_still_isolates() -> None:
    text = run_where_denied("mask", "ns")
    assert "there is no /proc inside" in text
    assert "RAN ns TestResult(verdict=<Verdict.PASSED" in text


@pytest.mark.usefixtures("_isolating_host")
async def test_a_backend_without_isolation_is_only_taken_by_name() -> None:
    with pytest.raises(ValueError, match="backend"):
        SandboxConfig(backend="none")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="async with"):
        _ = SandboxPool(SandboxConfig(backend="unsafe")).isolation
