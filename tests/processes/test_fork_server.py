"""Processes that begin as forks: their own in everything, this process's children, and ordinary where no fork can be."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mettle.processes import fork_server
from mettle.processes.child import ChildProcess, process_parent, process_state, python_module
from mettle.processes.fork_server import ForkServer
from mettle.processes.managed import ManagedProcess, ProcessSpec

pytestmark = pytest.mark.skipif(not fork_server.IS_POSSIBLE, reason="forks are handed on by Linux alone")
TELL = """
import json, os, sys, heavy
print(json.dumps({"argv": sys.argv[1:], "parent": os.getppid(), "session": os.getsid(0), "pid": os.getpid(),
                  "environment": os.environ.get("OWN"), "name": __name__, "made_by": heavy.pid, "cwd": os.getcwd(),
                  "command": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0))[1:]}))
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A folder of modules, among them `heavy`, which says which process has imported it."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "heavy.py").write_text("import os\npid = os.getpid()\n")

    def write(name, code):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))

    write("tell", TELL)
    return write


@pytest.fixture
def made(tmp_path):
    """A fork server that is to import what it is told, and the process that it is."""
    found = []

    def make(*imports):
        made = ForkServer()
        with made.theirs as theirs:
            command = python_module("mettle.processes.fork_server", str(theirs.fileno()), str(os.getpid()), *imports)
            options = {"tie": "thread", "output": tmp_path / "fork-server.out", "pass_fds": [theirs.fileno()]}
            importer = ChildProcess(command, **options)
        found.append((made, importer))
        while made.is_importing:
            time.sleep(0.005)
        return made, importer

    yield make
    for each, importer in found:
        each.close()
        importer.end()


def managed(made, tmp_path, module, *arguments, **environment):
    process = ManagedProcess(ProcessSpec(module, module, arguments, environment=environment), tmp_path / "out", made)
    process.start()
    return process


def test_a_fork_is_a_process_of_its_own_and_a_child_of_who_asked(modules, made, tmp_path):
    made, importer = made("heavy")
    process = managed(made, tmp_path, "tell", "a word", "--option", OWN="its own")
    assert process.wait(60) == 0
    said = json.loads((tmp_path / "out").read_text())
    assert said == {
        "argv": ["a word", "--option"], "parent": os.getpid(), "session": process.pid, "pid": process.pid,
        "environment": "its own", "name": "__main__", "made_by": importer.pid, "cwd": os.getcwd(),
        "command": ["-m", "tell", "a word", "--option"],
    }  # fmt: skip


def test_a_process_with_many_open_descriptors_has_forks_too(many_descriptors, modules, made, tmp_path):
    made, importer = made("heavy")
    process = managed(made, tmp_path, "tell")
    assert process.wait(60) == 0
    assert json.loads((tmp_path / "out").read_text())["made_by"] == importer.pid


def test_how_a_fork_ends_is_known_as_of_any_child(modules, made, tmp_path):
    modules("refuse", "import sys\nsys.exit('no')")
    modules("crash", "raise ValueError('what was wrong')")
    modules("leave", "import atexit, sys\natexit.register(lambda: print('bye'))\nsys.exit(3)")
    modules("stay", "import time\nwhile True: time.sleep(1)")
    made, _ = made("heavy")
    crashed = managed(made, tmp_path, "crash")
    assert (crashed.wait(60), crashed.last_line()) == (1, "ValueError: what was wrong")
    assert managed(made, tmp_path, "refuse").wait(60) == 1
    left = managed(made, tmp_path, "leave")
    assert (left.wait(60), left.last_line()) == (3, "bye")
    stays = managed(made, tmp_path, "stay")
    assert stays.exit_code() is None
    assert stays.wait(0.01) is None
    stays.signal(signal.SIGKILL)
    assert stays.wait(60) == -signal.SIGKILL
    stays = managed(made, tmp_path, "stay")
    stays.end()
    assert stays.exit_code() == -signal.SIGTERM


def test_a_fork_ends_when_its_threads_have_and_without_taking_its_modules_apart(modules, made, tmp_path):
    modules(
        "last_words",
        """
        import atexit, sys, threading, time
        from concurrent.futures import ThreadPoolExecutor
        class Kept:
            def __del__(self):
                print("taken apart")
        sys.modules["kept"] = kept = Kept()
        def work():
            time.sleep(0.2)
            print("worked")
        ThreadPoolExecutor().submit(work)
        threading.Thread(target=work).start()
        atexit.register(lambda: print("last", end=""))
        sys.stdout.write("begun\\n")
        """,
    )
    made, _ = made("heavy")
    assert managed(made, tmp_path, "last_words").wait(60) == 0
    assert (tmp_path / "out").read_text().split("\n") == ["begun", "worked", "worked", "last"]


def test_without_its_fork_server_a_process_is_a_new_interpreter(modules, made, tmp_path):
    made, importer = made("heavy")
    importer.kill()
    process = managed(made, tmp_path, "tell")
    assert process.wait(60) == 0
    assert json.loads((tmp_path / "out").read_text())["made_by"] == process.pid
    assert not made.is_ready


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "1 threads"),
        (
            "import sys, types\nsys.modules['torch'] = types.SimpleNamespace(version=types.SimpleNamespace(cuda='13'))",
            "drivers",
        ),
        ("raise ImportError('not installed')", "not installed"),
    ],
    ids=["threads", "an accelerator", "no such library"],
)
def test_a_fork_server_that_could_not_fork_well_ends_and_says_why(modules, made, tmp_path, code, why):
    modules("unfit", code)
    made, importer = made("unfit")
    assert importer.wait(60) == 1
    assert why in importer.tail()
    assert managed(made, tmp_path, "tell").wait(60) == 0


def test_forks_and_their_server_end_with_the_process_that_asked(modules, tmp_path):
    modules("stay", "import time\nwhile True: time.sleep(1)")
    modules(
        "asker",
        """
        import os, sys, time
        from pathlib import Path
        from mettle.processes.managed import ManagedProcess, ProcessSpec
        from mettle.runs import launcher
        launcher.FORKED = {"stay"}
        here = launcher.LocalLauncher(Path(sys.argv[1]), ["heavy"])
        spec = ProcessSpec("stay", "stay", ())
        while not here.can_start(spec):
            time.sleep(.005)
        process = here.process(spec)
        process.start()
        print(process.pid, *here.pids(), flush=True)
        time.sleep(600)
        """,
    )
    asker = subprocess.Popen([sys.executable, "-m", "asker", str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert asker.stdout is not None
    fork, importer = map(int, asker.stdout.readline().split())
    assert process_parent(fork) == asker.pid == process_parent(importer)
    asker.kill()
    asker.wait()
    asker.stdout.close()
    while any(map(process_state, (fork, importer))):
        time.sleep(0.01)


def test_a_launcher_takes_its_fork_server_back(modules, tmp_path):
    from mettle.runs.launcher import LocalLauncher

    launcher = LocalLauncher(Path(tmp_path), ["heavy"])
    assert not launcher.can_start(ProcessSpec("trainer", "mettle.trainer", ()))
    (pid,) = launcher.pids()
    launcher.close()
    assert launcher.pids() == []
    assert not process_state(pid)


def test_a_process_that_splits_has_forks_with_what_it_has_imported_itself(modules, tmp_path):
    modules("fail", "raise ValueError('what was wrong')")
    modules(
        "asker",
        """
        import os, sys, heavy
        from pathlib import Path
        from mettle.processes.child import process_state
        from mettle.processes.fork_server import split
        from mettle.processes.managed import ManagedProcess, ProcessSpec
        server = split()
        try:
            while server.is_importing:
                pass
            for module in ("tell", "fail"):
                process = ManagedProcess(ProcessSpec(module, module, ()), Path(sys.argv[1]) / module, server)
                process.start()
                print(process.pid, process.wait(60))
        except ValueError:
            print("a fork has come back")
        server.close()
        print(os.getpid(), process_state(server.twin.pid) or "reaped")
        """,
    )
    (tmp_path / "out").mkdir()
    done = subprocess.run([sys.executable, "-m", "asker", tmp_path / "out"], capture_output=True, text=True, timeout=60)
    (tell, code), (_, failed), (asker, twin) = (line.split() for line in done.stdout.splitlines())
    said = json.loads((tmp_path / "out" / "tell").read_text())
    assert (code, failed, twin) == ("0", "1", "reaped")
    assert (said["pid"], said["session"]) == (int(tell), int(tell))
    assert (said["parent"], said["made_by"]) == (int(asker), int(asker))
    assert (tmp_path / "out" / "fail").read_text().splitlines()[-1] == "ValueError: what was wrong"
