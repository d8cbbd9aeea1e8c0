"""torch is imported from the first moment of a run, by a process that never outlives it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mettle.processes import fork_server, importer
from mettle.processes.child import process_state
from mettle.processes.managed import ManagedProcess, ProcessSpec
from mettle.runs.head_start import head_start
from mettle.runs.launcher import IMPORTS, LocalLauncher, importer_of

SPARED = ("aiohttp", "sympy", "transformers", "torch._dynamo", "torch.distributed.checkpoint", "mettle.sandbox")


@pytest.fixture
def light(monkeypatch):
    """What imports at once, in place of torch."""
    monkeypatch.setattr("mettle.runs.head_start.IMPORTS", ("json",))


@pytest.mark.skipif(not fork_server.IS_POSSIBLE, reason="forks are handed on by Linux alone")
def test_what_has_begun_is_what_a_launcher_forks_from_and_ends_with_the_block(light, tmp_path):
    with head_start() as begun:
        assert begun is not None
        launcher = LocalLauncher(tmp_path, IMPORTS, begun=begun)
        assert launcher.pids() == [begun.pid]
        deadline = time.monotonic() + 60
        while not begun.has_decided() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert launcher.server("mettle.trainer").is_ready
        pid = begun.pid
    assert not process_state(pid)


@pytest.mark.skipif(not fork_server.IS_POSSIBLE, reason="forks are handed on by Linux alone")
def test_a_mistake_leaves_no_process(light):
    seen = []

    def mistaken():
        with head_start() as begun:
            seen.extend([begun, begun.pid])
            raise ValueError("a typo")

    with pytest.raises(ValueError, match="a typo"):
        mistaken()
    assert seen[0].pid is None
    assert not process_state(seen[1])


@pytest.mark.skipif(not fork_server.IS_POSSIBLE, reason="forks are handed on by Linux alone")
def test_a_command_that_is_killed_leaves_no_import_behind(tmp_path, monkeypatch):
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    code = (
        "import os, signal\n"
        "from mettle.runs import head_start\n"
        "head_start.IMPORTS = ('endless',)\n"
        "with head_start.head_start() as begun:\n"
        "    print(begun.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 60
    while process_state(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(not fork_server.IS_POSSIBLE, reason="forks are handed on by Linux alone")
def test_an_import_that_is_frozen_is_given_up_and_everybody_starts_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("mettle.runs.head_start.IMPORTS", ("never_done",))
    (tmp_path / "never_done.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with head_start() as begun:
        os.kill(pid := begun.pid, signal.SIGSTOP)
        assert not begun.has_decided()
        monkeypatch.setattr(importer, "PATIENCE_S", 0.0)
        assert begun.has_decided()
        assert not begun.server.is_ready
        assert not process_state(pid)
        process = ManagedProcess(
            ProcessSpec("alone", "mettle.cli", ("--version",)), tmp_path / "alone.out", LocalLauncher(
                tmp_path, IMPORTS, begun=begun
            ).server("mettle.trainer"),
        )  # fmt: skip
        process.start()
        assert process.wait(60.0) == 0


def test_a_build_for_accelerators_is_known_before_it_is_imported(tmp_path, monkeypatch):
    package = tmp_path / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert not fork_server.torch_has_drivers()
    (package / "lib" / "libtorch_cuda.so").touch()
    assert fork_server.torch_has_drivers()
    assert importer_of(IMPORTS, tmp_path / "out") is None
    with head_start() as begun:
        assert begun is None


def test_a_run_imports_nothing_that_few_runs_need():
    spared = f"print([name for name in {SPARED!r} if name in sys.modules])"
    launch = "import mettle.runs.launch\nprint('aiohttp' in sys.modules)"
    code = f"import sys, {', '.join(IMPORTS)}\n{spared}\n{launch}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["[]", "False"], done.stderr
