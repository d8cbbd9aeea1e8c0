"""The tests of a module, run on a fault: in a forked process, under limits, with the faulty source in its place.

Parts: `Trial` forks from a process that has loaded what it can (`preloading`), since imports are most of what a run of
pytest waits for. The child finds the module under test through `_Planted` instead of its file. The first trial has no fault; it
notes which test passes through which line, so that a fault is put only to tests that reach it.

Invariants: a trial ends: by itself, by its limit of processor time, or by
a limit on the clock that is far above it. Hypothesis draws the same examples every time and keeps none.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

CLOCK_FACTOR = 12
"""How many times its processor time a trial may take by the clock: the host may be busy."""
EVERY_TEST_OF_FILE = "*"
UNREWRITTEN = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""What was loaded before pytest has asserts that are none of ours."""


@dataclass
class Ended:
    """How a trial ended. `lines` has, by line of the module, the tests that pass through it."""

    exit_code: int | None
    cpu_s: float
    lines: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    output: str = ""
    modules: list[str] = field(default_factory=list)
    """What a traced trial had loaded at its end."""

    @property
    def is_green(self) -> bool:
        return self.exit_code == 0


class Trial:
    """Runs tests with `module` replaced."""

    def __init__(self, root: Path, module: str, path: Path) -> None:
        self.root, self.module, self.path = root, module, path

    def run(self, tests: list[str], tree: ast.Module, *, cpu_s: float, is_traced: bool = False) -> Ended:
        """Fork, plant `tree`, and run `tests`."""
        with tempfile.TemporaryDirectory() as folder:
            notes, output = Path(folder) / "notes.json", Path(folder) / "output.txt"
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                _in_child(self, tests, tree, cpu_s, is_traced, Path(folder))
            exit_code, spent_s = _wait(pid, cpu_s * CLOCK_FACTOR)
            ended = Ended(exit_code, spent_s, output=output.read_text(errors="replace")[-4000:])
            if notes.exists():
                noted = json.loads(notes.read_text())
                ended.modules = noted["modules"]
                for line, passing in noted["lines"].items():
                    ended.lines[int(line)] |= set(passing)
            return ended


def _wait(pid: int, limit_s: float) -> tuple[int | None, float]:
    """The exit code, None where it was killed; and its processor time."""
    deadline, delay_s = time.monotonic() + limit_s, 0.01
    while True:
        ended, status, used = os.wait4(pid, os.WNOHANG)
        if ended:
            # Whatever it has started and left behind is in its session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(status)
            return (code if code >= 0 else None), used.ru_utime + used.ru_stime
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            _, _, used = os.wait4(pid, 0)
            return None, used.ru_utime + used.ru_stime
        time.sleep(delay_s)
        delay_s = min(2 * delay_s, 0.1)


def _in_child(trial: Trial, tests: list[str], tree: ast.Module, cpu_s: float, is_traced: bool, folder: Path) -> None:
    code: int = 70
    try:
        os.setsid()
        output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        limit = int(cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
        os.chdir(trial.root)
        if trial.module in sys.modules:
            raise RuntimeError(f"{trial.module} was loaded before the fork: no fault of it would be seen")
        _quiet_hypothesis(folder)
        sys.meta_path.insert(0, _Planted(trial.module, trial.path, compile(tree, str(trial.path), "exec")))
        import pytest

        watch = _LineWatch(str(trial.path)) if is_traced else None
        options = [
            "-q",
            "-x",
            "--tb=line",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            *UNREWRITTEN,
            f"--basetemp={folder / 'tmp'}",
        ]
        options += [f"--timeout={cpu_s * CLOCK_FACTOR / 2:.0f}", "-m", "not nightly and not e2e and not gpu"]
        code = int(pytest.main([*options, *tests], plugins=[watch] if watch else []))
        if watch is not None:
            lines = {line: sorted(tests) for line, tests in watch.lines.items()}
            (folder / "notes.json").write_text(json.dumps({"modules": sorted(sys.modules), "lines": lines}))
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _quiet_hypothesis(folder: Path) -> None:
    """The same examples every time, none kept, and no time spent on making a failing one small."""
    from hypothesis import Phase, configuration, settings

    configuration.set_hypothesis_home_dir(folder / "hypothesis")
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("trial", settings.default, derandomize=True, database=None, phases=phases)
    settings.load_profile("trial")


class _Planted(importlib.abc.MetaPathFinder):
    """Finds one module as compiled code instead of its file."""

    def __init__(self, module: str, path: Path, code: CodeType) -> None:
        self.module, self.path, self.code = module, path, code

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module:
            return None
        loader = _CodeLoader(fullname, str(self.path))
        loader.code = self.code
        return importlib.util.spec_from_file_location(fullname, self.path, loader=loader)


class _CodeLoader(importlib.machinery.SourceFileLoader):
    code: CodeType

    def get_code(self, fullname: str) -> CodeType:
        return self.code


class _LineWatch:
    """A plugin of pytest that notes which test passes through which line of a file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.test = EVERY_TEST_OF_FILE
        self.lines: dict[int, set[str]] = defaultdict(set)
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename == self.path else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.lines[frame.f_lineno].add(self.test)
        return self._line

    def pytest_runtest_setup(self, item: Any) -> None:
        # What a fixture of several tests does is done once, and belongs to all of them.
        self.test = f"{item.nodeid.partition('::')[0]}::{EVERY_TEST_OF_FILE}"

    def pytest_runtest_call(self, item: Any) -> None:
        self.test = item.nodeid
        sys.settrace(self._enter)  # a debugger's or a coroutine runner's may have taken its place

    def pytest_runtest_teardown(self, item: Any) -> None:
        self.test = f"{item.nodeid.partition('::')[0]}::{EVERY_TEST_OF_FILE}"
