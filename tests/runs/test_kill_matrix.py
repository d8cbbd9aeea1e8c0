"""Kill -9 any process of a run at several points: it recovers or is resumed, and the accounts hold.

After every story: each step has one batch, each task that trained did so in one step, none is left in between, a
replayed version has the same bytes as before, and the run reached its last step.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mettle.errors import StorageError
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 12
CONFIG = f"""
max_steps = {STEPS}
seed = 5

[orchestrator]
batch_size = 32
group_size = 8
max_staleness = 4

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


@dataclass(frozen=True)
class Story:
    victim: str
    points: tuple[Callable[[Ledger], bool], ...]


STORIES = {
    "inference: while rollouts run, between steps, near the end": Story(
        "inference", (rolling_out, published(3), published(STEPS - 2))
    ),
    "orchestrator: while rollouts run, after shipping, near the end": Story(
        "orchestrator", (rolling_out, shipped(4), published(STEPS - 1))
    ),
    "trainer: before its first step, between checkpoints, after one": Story(
        "trainer", (shipped(1), published(3), published(6))
    ),
    "supervisor: while rollouts run, between checkpoints, near the end": Story(
        "supervisor", (rolling_out, published(5), published(STEPS - 1))
    ),
}


class Run:
    """A run in processes of its own, as a person starts it."""

    def __init__(self, folder: Path, config: str = CONFIG) -> None:
        self.run_dir = RunDir(folder / "run")
        self._config = folder / "run.toml"
        self._config.write_text(config)
        self._output = (folder / "output.txt").open("ab")
        self._environment = {**os.environ, "METTLE_ENVIRONMENTS": str(Path(__file__).parent / "environments")}
        self.process = self._start("rl", "run", str(self._config), "--dir", str(self.run_dir.path))

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "mettle.cli", *arguments]
        return subprocess.Popen(command, stdout=self._output, stderr=self._output, env=self._environment)

    def resume(self) -> None:
        self.process = self._start("rl", "resume", str(self.run_dir.path))

    def read(self, look: Callable[[Ledger], Any], default: Any) -> Any:
        with contextlib.suppress(StorageError):
            ledger = Ledger(self.run_dir.ledger, is_read_only=True)
            try:
                return look(ledger)
            finally:
                ledger.close()
        return default

    def wait_for(self, point: Callable[[Ledger], bool], limit_s: float = 90.0) -> None:
        deadline = time.monotonic() + limit_s
        while not self.read(point, False):
            assert self.process.poll() is None, "the run ended before it reached the point"
            assert time.monotonic() < deadline, "the run did not reach the point in time"
            time.sleep(0.02)

    def kill(self, victim: str) -> None:
        if victim == "supervisor":
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.resume()
            return
        pids = self.read(lambda ledger: {p.name: p.pid for p in ledger.journal.processes()}, {})
        os.kill(pids[victim], signal.SIGKILL)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._output.close()


def check_accounts(ledger: Ledger) -> None:
    counts = ledger.task_counts()
    assert ledger.journal.fact("state") == "finished"
    assert {name.split(":")[0] for name in counts} <= {"trained", "dropped"}, counts
    assert STEPS <= counts["trained"] <= STEPS * 4
    per_step = ledger.database.rows("SELECT count(*) AS n FROM tasks WHERE state = 'trained' GROUP BY step")
    assert len(per_step) == STEPS
    assert all(1 <= row["n"] <= 4 for row in per_step)
    assert [batch.step for batch in ledger.batches()] == list(range(1, STEPS + 1))
    assert all(batch.trained_at is not None for batch in ledger.batches())
    assert ledger.newest_version().weights.version == STEPS
    twice = ledger.database.value(
        "SELECT count(*) FROM (SELECT uid FROM tasks WHERE state = 'trained' GROUP BY uid, epoch HAVING count(*) > 1)"
    )
    assert twice == 0
    assert [e.message for e in ledger.journal.events() if "diverged" in e.kind] == []
    assert max(batch.staleness_max for batch in ledger.batches()) <= 4
    assert [row.kind for row in ledger.journal.evals()] == ["baseline", "final"]


@pytest.mark.parametrize("name", STORIES)
def test_a_killed_process_costs_no_task_and_trains_none_twice(tmp_path, name):
    story = STORIES[name]
    run = Run(tmp_path)
    try:
        for point in story.points:
            run.wait_for(point)
            run.kill(story.victim)
            time.sleep(0.3)
        assert run.process.wait(timeout=150) == 0, (tmp_path / "output.txt").read_text()[-3000:]
    finally:
        run.close()
    ledger = Ledger(run.run_dir.ledger, is_read_only=True)
    try:
        check_accounts(ledger)
        if story.victim != "supervisor":
            restarts = {p.name: p.restarts for p in ledger.journal.processes()}
            assert restarts[story.victim] == len(story.points)
        if story.victim == "trainer":
            assert max(batch.trainings for batch in ledger.batches()) > 1, "no step was replayed: the test saw nothing"
    finally:
        ledger.close()


WARM_CONFIG = """
max_steps = 3

[warm_up]
enabled = true

[warm_up.sft]
target_reward = 0.1

[orchestrator]
batch_size = 64
group_size = 16
max_staleness = 4
eval = { num_examples = 0 }
sampling = { max_tokens = 8 }
envs = [{ id = "reverse-text" }]
"""


def warming_up(ledger: Ledger) -> bool:
    return len(ledger.journal.metric("sft/loss")) >= 5


def test_a_killed_warm_up_starts_over_and_a_killed_page_comes_back_where_it_was(tmp_path):
    run = Run(tmp_path, WARM_CONFIG)
    try:
        run.wait_for(warming_up)
        before = json.loads(run.run_dir.endpoint("hub").read_text())
        run.kill("sft")
        run.kill("hub")
        run.wait_for(published(1))
        after = json.loads(run.run_dir.endpoint("hub").read_text())
        assert after["port"] == before["port"]
        assert after["pid"] != before["pid"]
        assert run.process.wait(timeout=150) == 0, (tmp_path / "output.txt").read_text()[-3000:]
    finally:
        run.close()
    ledger = Ledger(run.run_dir.ledger, is_read_only=True)
    try:
        assert ledger.journal.fact("state") == "finished"
        assert ledger.journal.fact("warm_up")["reward"] >= 0.1
        assert {p.name: p.restarts for p in ledger.journal.processes()} == {
            "hub": 1, "sft": 1, "inference": 0, "orchestrator": 0, "trainer": 0,
        }  # fmt: skip
    finally:
        ledger.close()
