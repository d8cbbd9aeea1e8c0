"""A run that is stopped, fails, or finds its checkpoints cut short: it says so in one line, and nothing is lost.

"Nothing lost" is checked by going on: the run is resumed to its end and its accounts hold.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from stories import STEPS, Run, complaint, mettle_in, published

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(params=[24])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    """A run that has begun, long enough to be caught in the middle."""
    started = Run(tmp_path, steps=request.param)
    yield started
    started.close()


def test_a_reward_that_always_raises_ends_the_run_and_is_quoted(tmp_path):
    run = Run(tmp_path, "--orchestrator.envs.0.id", "raises")
    try:
        assert run.end() == 2
        assert "environment 'raises' failed every rollout" in run.complaint()
        assert "the judge has a headache" in run.complaint()
        assert run.read(lambda ledger: ledger.journal.fact("state"), None) == "failed"
    finally:
        run.close()


def test_a_reward_that_raises_for_some_rollouts_costs_those_and_no_run(tmp_path):
    run = Run(tmp_path, "--orchestrator.envs.0.id", "raises", "--orchestrator.envs.0.args.every", "5")
    try:
        assert run.end() == 0, run.said()
        run.check_accounts()
        errored = run.read(
            lambda ledger: ledger.database.rows("SELECT * FROM rollouts WHERE error_kind IS NOT NULL"), []
        )
        assert len(errored) > STEPS
        assert {row["error_kind"] for row in errored} == {"judge"}
        assert all(row["reward"] is None for row in errored)
    finally:
        run.close()


@pytest.mark.parametrize("run", [60], indirect=True, ids=["long"])  # it goes on while three commands look at it
def test_a_run_that_is_running_is_left_alone_and_can_be_stopped_from_elsewhere(run, tmp_path):
    run.wait_for(published(1))
    assert "is already running" in complaint(tmp_path, "rl", "resume", run.path)
    assert "there is a run at" in complaint(tmp_path, "rl", "run", "run.toml", "--dir", run.path)
    stopped = mettle_in(tmp_path, "rl", "stop", run.path)
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert f"next: mettle rl resume {run.path}" in stopped.stdout
    assert run.end() == 130
    assert f"`mettle rl resume {run.path}` continues the run" in run.said()
    again = mettle_in(tmp_path, "rl", "stop", run.path)
    assert (again.returncode, "was not running" in again.stdout) == (0, True)
    run.resume()
    assert run.end() == 0, run.said()
    run.check_accounts()
    assert "is finished" in complaint(tmp_path, "rl", "resume", run.path)
    assert "there is a run at" in complaint(tmp_path, "rl", "run", "run.toml", "--dir", run.path)
    run.check_accounts()


def test_after_ctrl_c_the_way_on_is_told_and_works(run):
    run.wait_for(published(2))
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    last = run.said().splitlines()[-1]
    assert last == f"stopped; `mettle rl resume {run.path}` continues the run"
    assert run.read(lambda ledger: ledger.journal.fact("state"), None) == "stopped"
    run.resume()
    assert run.end() == 0, run.said()
    run.check_accounts()


def stop_after(run: Run, version: int) -> list[Path]:
    """Stop the run when there is a checkpoint of `version`; returns the checkpoints, the newest first."""
    run.wait_for(lambda _: (run.run_dir.checkpoints / f"step-{version}" / "manifest.json").exists())
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 130, run.said()
    found = [path for path in run.run_dir.checkpoints.glob("step-*")]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def cut_short(checkpoint: Path) -> Path:
    largest = max(checkpoint.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return largest


def test_a_checkpoint_cut_short_is_passed_over_and_the_run_goes_on_from_an_older_one(tmp_path):
    run = Run(tmp_path, "--trainer.checkpoint.interval", "2")
    try:
        newest, older = stop_after(run, 6)[:2]
        cut_short(newest)
        run.resume()
        assert run.end() == 0, run.said()
        run.check_accounts()
        messages = run.read(lambda ledger: [event.message for event in ledger.journal.events()], [])
        assert any(f"checkpoint {newest.name} is passed over" in m and "bytes instead of" in m for m in messages)
        assert any(f"resumed from v{older.name.removeprefix('step-')};" in message for message in messages)
    finally:
        run.close()


def test_without_a_whole_checkpoint_or_the_batches_since_the_run_says_so_and_touches_nothing(tmp_path):
    run = Run(tmp_path, "--trainer.checkpoint.interval", "2")
    try:
        checkpoints = stop_after(run, 6)
        for checkpoint in checkpoints:
            cut_short(checkpoint)
        before = run.read(lambda ledger: (ledger.task_counts(), ledger.newest_version()), None)
        run.resume()
        assert run.end() == 2, run.said()
        line = run.complaint()
        assert "cannot resume run: the newest state is the initial policy (no complete checkpoint)" in line
        assert "the batch of step 1 that must be trained again from there is gone" in line
        after = run.read(lambda ledger: (ledger.task_counts(), ledger.newest_version()), None)
        assert after[0].get("trained") == before[0].get("trained")
        assert after[1].weights == before[1].weights
        assert all(checkpoint.exists() for checkpoint in checkpoints)
    finally:
        run.close()
