"""Shares as a person starts them: several runs beside one base, some of which are killed, broken or stopped.

What must hold for each is what holds for a run alone (`check_accounts`): each task trained once, in one step.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stories import STEPS, check_accounts, complaint, environment, mettle_in

from mettle.errors import StorageError
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.share_dir import ShareDir
from mettle.trainer.policy import write_policy
from mettle.trainer.presets import preset

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.usefixtures("forked")]

TEXT = """
max_steps = {steps}
seed = {seed}
model = {{ lora = {{ rank = 4, alpha = 8 }} }}

[orchestrator]
batch_size = 32
group_size = 8
max_staleness = 4
env_workers = 0
sampling = {{ max_tokens = 6 }}
envs = [{{ id = "{env}" }}]
eval = {{ num_examples = 8 }}

[trainer]
optim = {{ lr = 1e-3 }}
checkpoint = {{ interval = 4 }}

[deployment]
hub = false
"""


class Share:
    """A share of the runs named in `envs`, each on its environment, in processes of its own."""

    def __init__(self, folder: Path, envs: dict[str, str], steps: int = STEPS) -> None:
        self.folder, self.steps = folder, steps
        write_policy(folder / "base", preset("tiny"))
        self.files = []
        for seed, (name, env) in enumerate(envs.items()):
            self.files.append(folder / f"{name}.toml")
            self.files[-1].write_text(TEXT.format(steps=steps, seed=seed, env=env))
        self.share = ShareDir(folder / "s")
        self.process = self.start("share", *map(str, self.files), "--base-model", "base", "--dir", "s")

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / "stderr.txt").open("wb") as err, (self.folder / "stdout.txt").open("wb") as out:
            command = [sys.executable, "-m", "mettle.cli", "rl", *arguments, "--json"]
            return subprocess.Popen(command, cwd=self.folder, stdout=out, stderr=err, env=environment())

    def resume(self) -> None:
        self.process = self.start("resume", "s")

    def read(self, path: Path, look: Callable[[Ledger], object]) -> object:
        with contextlib.suppress(StorageError):
            ledger = Ledger(RunDir(path).ledger, is_read_only=True)
            try:
                return look(ledger)
            finally:
                ledger.close()
        return None

    def wait_for(self, name: str, step: int, limit_s: float = 400.0) -> None:
        """Until a run has published a version."""

        def is_there(ledger: Ledger) -> bool:
            newest = ledger.newest_version()
            return newest is not None and newest.weights.version >= step

        deadline = time.monotonic() + limit_s
        while not self.read(self.share.runs / name, is_there):
            assert self.process.poll() is None, (self.folder / "stderr.txt").read_text()
            assert time.monotonic() < deadline, "the run did not reach the point in time"
            time.sleep(0.02)

    def kill(self, path: Path, victim: str) -> None:
        pids = self.read(path, lambda ledger: {p.name: p.pid for p in ledger.journal.processes()})
        assert isinstance(pids, dict)
        os.kill(pids[victim], signal.SIGKILL)

    def end(self) -> tuple[int, dict[str, dict[str, object]]]:
        """The exit code, and how each run has ended."""
        code = self.process.wait(timeout=900)
        out = (self.folder / "stdout.txt").read_text()
        assert out, (self.folder / "stderr.txt").read_text()
        return code, {row["run"]: row for row in json.loads(out)["runs"]}

    def check(self, name: str) -> None:
        ledger = Ledger(RunDir(self.share.runs / name).ledger, is_read_only=True)
        try:
            check_accounts(ledger, self.steps)
        finally:
            ledger.close()
        assert (self.share.runs / name / "adapter" / "adapter_model.safetensors").exists()


@pytest.fixture
def shares(tmp_path: Path) -> Iterator[Callable[..., Share]]:
    made: list[Share] = []

    def make(envs: dict[str, str], **options: int) -> Share:
        made.append(Share(tmp_path, envs, **options))
        return made[-1]

    yield make
    for share in made:
        if share.process.poll() is None:
            share.process.kill()
            share.process.wait()


def test_killed_trainer_engine_and_orchestrator_cost_no_run_anything(shares):
    share = shares({"a": "ascii-share", "b": "ascii-share"})
    share.wait_for("a", 2)
    share.kill(share.share.path, "trainer")
    share.wait_for("b", 4)
    share.kill(share.share.path, "inference")
    share.wait_for("a", 6)
    share.kill(share.share.runs / "a", "orchestrator")
    code, rows = share.end()
    assert code == 0, rows
    assert {name: row["state"] for name, row in rows.items()} == {"a": "finished", "b": "finished"}
    share.check("a")
    share.check("b")
    restarts = share.read(share.share.path, lambda ledger: {p.name: p.restarts for p in ledger.journal.processes()})
    assert restarts == {"trainer": 1, "inference": 1}
    compared = share.read(share.share.path, lambda ledger: ledger.journal.fact("mismatch"))
    assert isinstance(compared, dict)
    assert [name for name, _, _ in compared["table"]["adapter"]] == ["a", "b"]
    assert compared["causes"] == {}
    assert "already" in complaint(share.folder, "rl", "share", "a.toml", "--base-model", "base", "--dir", "s")


@pytest.mark.nightly  # each of its parts is held in process: tests/trainer/test_sharing.py, tests/runs/test_shares.py
def test_a_run_whose_rewards_raise_ends_alone(shares):
    share = shares({"a": "ascii-share", "b": "raises", "c": "ascii-share"})
    code, rows = share.end()
    assert (code, rows["b"]["code"], rows["b"]["state"]) == (2, 2, "failed")
    assert "the judge has a headache" in rows["b"]["error"]
    share.check("a")
    share.check("c")


@pytest.mark.nightly
def test_a_share_that_is_killed_or_stopped_goes_on_with_all_its_runs(shares):
    share = shares({"a": "ascii-share", "b": "ascii-share"})
    share.wait_for("a", 2)
    share.process.kill()
    share.process.wait()
    share.resume()
    share.wait_for("b", 5)
    share.process.send_signal(signal.SIGINT)
    code, rows = share.end()
    assert (code, {row["state"] for row in rows.values()}) == (130, {"stopped"})
    share.resume()
    code, _ = share.end()
    assert code == 0
    share.check("a")
    share.check("b")


@pytest.mark.nightly
def test_a_run_joins_from_elsewhere_and_leaves_when_it_is_through(shares):
    share = shares({"a": "ascii-share"}, steps=40)
    share.wait_for("a", 2)
    late = share.folder / "late.toml"
    late.write_text(TEXT.format(steps=4, seed=9, env="ascii-share"))
    done = mettle_in(share.folder, "rl", "run", "late.toml", "--share", "s", "--dir", "late", "--json", limit_s=900)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "finished"
    assert (share.folder / "late" / "adapter").exists()
    code, _ = share.end()
    assert code == 0
    share.check("a")
