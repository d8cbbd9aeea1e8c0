"""A run that is stopped, fails, or finds its checkpoints cut short: it says so in one line, and nothing is lost.

"Nothing lost" is checked by going on: the run is resumed to its end and its accounts hold. A run costs a dozen seconds
of processor time for its processes to start, so one run is led through everything, and each test looks at one thing
that was noted on the way; a second one, which is stopped from elsewhere, is nightly (`tests/cli/test_rl.py` stops a
stand-in every day).
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from stories import STEPS, Run, complaint, mettle_in, published

from mettle.storage.run_dir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

ENDLESS = 1_000_000
"""Steps of a run that is stopped before its end, however long the commands that look at it take."""


@pytest.mark.nightly  # in one process: `test_an_environment_that_always_fails...` of the orchestrator's simulation
def test_a_reward_that_always_raises_ends_the_run_and_is_quoted(tmp_path):
    run = Run(tmp_path, "--orchestrator.envs.0.id", "raises")
    try:
        assert run.end() == 2
        assert "environment 'raises' failed every rollout" in run.complaint()
        assert "the judge has a headache" in run.complaint()
        assert run.read(lambda ledger: ledger.journal.fact("state"), None) == "failed"
    finally:
        run.close()


def checkpoints_of(run: Run) -> list[Path]:
    """The newest first."""
    found = run.run_dir.checkpoints.glob("step-*")
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def wait_for_checkpoint(run: Run, version: int) -> None:
    """Until there is a whole one of this step or a later one; older ones are deleted as it goes."""

    def is_there(_: object) -> bool:
        whole = [path for path in checkpoints_of(run) if (path / "manifest.json").exists()]
        return bool(whole) and int(whole[0].name.removeprefix("step-")) >= version

    run.wait_for(is_there)


def cut_short(checkpoint: Path) -> None:
    largest = max(checkpoint.rglob("*.pt"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


@dataclass
class Continued:
    """A run whose rewards raise now and then, stopped with Ctrl-C, resumed from an older checkpoint, and finished."""

    run: Run
    folder: Path
    end_of_the_stop: int
    said_at_the_stop: str
    state_when_stopped: str
    cut: Path
    older: Path
    end: int


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory, forked: None) -> Iterator[Continued]:
    folder = tmp_path_factory.mktemp("continued")
    raises = ("--orchestrator.envs.0.id", "raises", "--orchestrator.envs.0.args.every", "5")
    run = Run(folder, "--trainer.checkpoint.interval", "2", *raises)
    try:
        wait_for_checkpoint(run, 6)
        run.process.send_signal(signal.SIGINT)
        stopped, said = run.end(), run.said()
        state = run.read(lambda ledger: ledger.journal.fact("state"), None)
        newest, older = checkpoints_of(run)[:2]
        cut_short(newest)
        run.resume()
        yield Continued(run, folder, stopped, said, state, newest, older, run.end())
    finally:
        run.close()


def test_after_ctrl_c_the_way_on_is_told_and_works(continued):
    assert continued.end_of_the_stop == 130
    last = continued.said_at_the_stop.splitlines()[-1]
    assert last == f"stopped; `mettle rl resume {continued.run.path}` continues the run"
    assert continued.state_when_stopped == "stopped"
    assert continued.end == 0, continued.run.said()
    continued.run.check_accounts()


def test_a_checkpoint_cut_short_is_passed_over_and_the_run_goes_on_from_an_older_one(continued):
    messages = continued.run.read(lambda ledger: [event.message for event in ledger.journal.events()], [])
    assert any(f"checkpoint {continued.cut.name} is passed over" in m and "bytes instead of" in m for m in messages)
    resumed = f"resumed from v{continued.older.name.removeprefix('step-')};"
    assert any(resumed in message for message in messages)


def test_a_reward_that_raises_for_some_rollouts_costs_those_and_no_run(continued):
    errored = continued.run.read(
        lambda ledger: ledger.database.rows("SELECT * FROM rollouts WHERE error_kind IS NOT NULL"), []
    )
    assert len(errored) > STEPS
    assert {row["error_kind"] for row in errored} == {"judge"}
    assert all(row["reward"] is None for row in errored)


def test_a_finished_run_is_left_alone(continued):
    run = continued.run
    assert "is finished" in complaint(continued.folder, "rl", "resume", run.path)
    assert "there is a run at" in complaint(continued.folder, "rl", "run", "run.toml", "--dir", run.path)
    run.check_accounts()


@dataclass
class Halted:
    """A long run that was stopped from elsewhere, after others had tried to take it over while it ran."""

    run: Run
    folder: Path
    refusals: dict[str, str]
    stopped: Any
    end: int
    said: str


@pytest.fixture(scope="module")
def halted(tmp_path_factory: pytest.TempPathFactory, forked: None) -> Iterator[Halted]:
    folder = tmp_path_factory.mktemp("halted")
    run = Run(folder, "--trainer.checkpoint.interval", "2", steps=ENDLESS)
    try:
        run.wait_for(published(1))
        refusals = {
            "resume": complaint(folder, "rl", "resume", run.path),
            "run": complaint(folder, "rl", "run", "run.toml", "--dir", run.path),
        }
        wait_for_checkpoint(run, 6)
        stopped = mettle_in(folder, "rl", "stop", run.path)
        yield Halted(run, folder, refusals, stopped, run.end(), run.said())
    finally:
        run.close()


@pytest.mark.nightly
def test_a_run_that_is_running_is_left_alone_and_can_be_stopped_from_elsewhere(halted):
    assert "is already running" in halted.refusals["resume"]
    assert "there is a run at" in halted.refusals["run"]
    assert (halted.stopped.returncode, halted.stopped.stderr) == (0, "")
    assert f"next: mettle rl resume {halted.run.path}" in halted.stopped.stdout
    assert halted.end == 130
    assert f"`mettle rl resume {halted.run.path}` continues the run" in halted.said
    again = mettle_in(halted.folder, "rl", "stop", halted.run.path)
    assert (again.returncode, "was not running" in again.stdout) == (0, True)


@pytest.mark.nightly  # in one process: `orchestrator/test_rebuilding.py`
def test_without_a_whole_checkpoint_or_what_batches_are_made_from_the_run_says_so_and_touches_nothing(halted):
    run = halted.run
    checkpoints = checkpoints_of(run)
    for checkpoint in checkpoints:
        cut_short(checkpoint)
    for shard in RunDir(Path(run.path)).rollouts.glob("*.bin"):
        os.truncate(shard, 100)
    before = run.read(lambda ledger: (ledger.task_counts(), ledger.newest_version()), None)
    run.resume()
    assert run.end() == 2, run.said()
    line = run.complaint()
    assert "and it cannot be made again" in line
    assert "The run cannot go past step 0: put the file back from a copy, or start a new run" in line
    after = run.read(lambda ledger: (ledger.task_counts(), ledger.newest_version()), None)
    assert after[0].get("trained") == before[0].get("trained")
    assert after[1].weights == before[1].weights
    assert all(checkpoint.exists() for checkpoint in checkpoints)
