"""A small run in processes of its own, as a person starts it, and the accounts that must hold at its end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mettle
from mettle.errors import StorageError
from mettle.storage.evals import read_evals
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir

ENVIRONMENTS = Path(__file__).parent / "environments"
FAULTS = Path(__file__).parent / "faults"
STEPS = 12
CONFIG = f"""
max_steps = {STEPS}
seed = 5

[orchestrator]
batch_size = 32
group_size = 8
max_staleness = 4
env_workers = 0

[orchestrator.sampling]
max_tokens = 6

[[orchestrator.envs]]
id = "ascii-share"

[orchestrator.eval]
num_examples = 8

[trainer.optim]
lr = 1e-4

[trainer.checkpoint]
interval = 4

[deployment]
hub = false
"""


def shipped(step: int) -> Callable[[Ledger], bool]:
    return lambda ledger: ledger.batch(step) is not None


def published(version: int) -> Callable[[Ledger], bool]:
    def is_there(ledger: Ledger) -> bool:
        newest = ledger.newest_version()
        return newest is not None and newest.weights.version >= version

    return is_there


def rolling_out(ledger: Ledger) -> bool:
    return ledger.task_counts().get("in_flight", 0) > 0


def environment(faults: Path | None = None) -> dict[str, str]:
    """The environment of a command, with this Mettle, from any folder, and the tests' own environments.

    With a folder of `faults`, every process can be given one (see `faults/sitecustomize.py`).
    """
    source = str(Path(mettle.__file__).parents[1])
    injected = [] if faults is None else [str(FAULTS)]
    paths = os.pathsep.join([source, *injected, *filter(None, [os.environ.get("PYTHONPATH")])])
    added = {} if faults is None else {"METTLE_TEST_FAULTS": str(faults)}
    return {**os.environ, "METTLE_ENVIRONMENTS": str(ENVIRONMENTS), "PYTHONPATH": paths, **added}


def mettle_in(folder: Path, *arguments: object, limit_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    """One command in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "mettle.cli", *(str(argument) for argument in arguments)],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=limit_s,
    )  # fmt: skip


def complaint(folder: Path, *arguments: object) -> str:
    """The line with which a command refuses; it must be the only one, with exit code 2."""
    done = mettle_in(folder, *arguments)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr.strip()


class Run:
    """A run in processes of its own, in `folder` or `at` another place. `prefix` is put before each command."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        steps: int = STEPS,
        prefix: Sequence[str] = (),
        at: Path | None = None,
        text: str = CONFIG,
        faults: Path | None = None,
    ) -> None:
        self._environment = environment(faults)
        self.path = (at or folder) / "run"
        self.run_dir = RunDir(self.path)
        self.steps = steps
        config = folder / "run.toml"
        config.write_text(text)
        self._output = (folder / "output.txt").open("ab")
        self.stderr = folder / "stderr.txt"
        self._prefix = prefix
        shared = ("--dir", str(self.path), "--max-steps", str(steps))
        self.process = self._start("rl", "run", str(config), *shared, *overrides)

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [*self._prefix, sys.executable, "-m", "mettle.cli", *arguments]
        with self.stderr.open("wb") as stderr:
            return subprocess.Popen(command, stdout=self._output, stderr=stderr, env=self._environment)

    def resume(self) -> None:
        self.process = self._start("rl", "resume", str(self.path))

    def read(self, look: Callable[[Ledger], Any], default: Any) -> Any:
        with contextlib.suppress(StorageError):
            ledger = Ledger(self.run_dir.ledger, is_read_only=True)
            try:
                return look(ledger)
            finally:
                ledger.close()
        return default

    def wait_for(self, point: Callable[[Ledger], bool], limit_s: float = 400.0) -> None:
        deadline = time.monotonic() + limit_s
        while not self.read(point, False):
            assert self.process.poll() is None, f"the run ended before it reached the point: {self.said()}"
            assert time.monotonic() < deadline, "the run did not reach the point in time"
            time.sleep(0.02)

    def kill(self, victim: str) -> None:
        if victim == "supervisor":
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.resume()
            return
        self.wait_for(lambda ledger: any(p.name == victim and p.pid for p in ledger.journal.processes()))
        pids = self.read(lambda ledger: {p.name: p.pid for p in ledger.journal.processes()}, {})
        os.kill(pids[victim], signal.SIGKILL)

    def end(self, limit_s: float = 600.0) -> int:
        """Wait for the end of the command; returns its exit code."""
        return self.process.wait(timeout=limit_s)

    def said(self) -> str:
        """What the newest command wrote on standard error."""
        return self.stderr.read_text()

    def complaint(self) -> str:
        """The one line in which the newest command told what is wrong, after its progress."""
        lines = [line for line in self.said().splitlines() if not line.startswith("[")]
        assert len(lines) == 1, self.said()
        assert lines[0].startswith("error: ")
        return lines[0]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._output.close()

    def check_accounts(self, run_dir: RunDir | None = None) -> None:
        """The accounts at the end of the run, or those in a copy of it."""
        ledger = Ledger((run_dir or self.run_dir).ledger, is_read_only=True)
        try:
            check_accounts(ledger, self.steps)
        finally:
            ledger.close()


def check_accounts(ledger: Ledger, steps: int = STEPS) -> None:
    """Each step has one batch, each task that trained did so in one step, and none is left in between."""
    counts = ledger.task_counts()
    assert ledger.journal.fact("state") == "finished"
    assert {name.split(":")[0] for name in counts} <= {"trained", "dropped"}, counts
    assert steps <= counts["trained"] <= steps * 4
    per_step = ledger.database.rows("SELECT count(*) AS n FROM tasks WHERE state = 'trained' GROUP BY step")
    assert len(per_step) == steps
    assert all(1 <= row["n"] <= 4 for row in per_step)
    assert [batch.step for batch in ledger.batches()] == list(range(1, steps + 1))
    assert all(batch.trained_at is not None for batch in ledger.batches())
    assert ledger.newest_version().weights.version == steps
    twice = ledger.database.value(
        "SELECT count(*) FROM (SELECT uid FROM tasks WHERE state = 'trained' GROUP BY uid, epoch HAVING count(*) > 1)"
    )
    assert twice == 0
    assert [e.message for e in ledger.journal.events() if "diverged" in e.kind] == []
    assert max(batch.staleness_max for batch in ledger.batches()) <= 4
    assert [row.kind for row in read_evals(ledger.database)] == ["baseline", "final"]
