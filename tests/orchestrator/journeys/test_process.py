"""The process: exit codes, a clean end on SIGTERM, and taking up a run after a kill."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mettle.processes.beats import BEATS_FOLDER, read_beats, waits_of
from mettle.storage.evals import read_evals
from mettle.storage.ledger import Ledger


@pytest.fixture
def start(run_dir):
    running = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-m", "mettle.orchestrator", str(run_dir.path)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, BEATS_FOLDER: str(run_dir.beats)},
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def until(condition, trainer=None, timeout_s=400.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        if trainer is not None:
            trainer.train_what_is_shipped()
        time.sleep(0.02)


def ended(process, trainer=None):
    until(lambda: process.poll() is not None, trainer)
    return process.returncode


def test_a_run_goes_to_its_end_and_closes_its_accounts(run_dir, stand_in, trainer, settings, write_config, start):
    write_config(settings)
    assert ended(start(), trainer) == 0
    ledger = Ledger(run_dir.ledger, is_read_only=True)
    counts = ledger.task_counts()
    assert counts["trained"] == 12
    assert {name.split(":")[0] for name in counts} <= {"trained", "dropped"}
    assert [(row.kind, row.step, row.num_tasks) for row in read_evals(ledger.database)] == [
        ("baseline", 0, 5),
        ("final", 3, 5),
    ]
    assert stand_in.pushed[0] == 0
    assert stand_in.pushed[-1] == stand_in.version == 3
    assert ledger.version(3).acked_at is not None
    assert ledger.journal.fact("state") == "finished"
    names = set(ledger.journal.metric_names())
    assert {
        "reward/mean", "reward/std", "reward/p10", "reward/p90", "reward/words", "rollouts/error_rate",
        "rollouts/truncated_rate", "rollouts/tokens_mean", "rollouts/per_s", "groups/solved_all", "groups/solved_none",
        "groups/zero_advantage", "staleness/mean", "staleness/max", "staleness/dropped",
        "throughput/inference_tokens_per_s", "time/wait_for_policy_s", "time/gather_s", "time/pack_s",
        "canary/mean_abs_diff", "canary/max_abs_diff", "weights/update_ms", "queue/ready_groups",
        "queue/inflight_groups", "event_loop_lag/max_ms",
    } <= names  # fmt: skip
    assert [step for step, _ in ledger.journal.metric("reward/mean")] == [1, 2, 3]
    ledger.close()
    assert ended(start()) == 0


def test_sigterm_puts_back_what_is_in_flight_and_exits_with_0(
    run_dir, stand_in, trainer, settings, write_config, start
):
    write_config({**settings, "eval": {"num_examples": 0}})
    stand_in.delay_s = 0.3
    process = start()
    ledger = Ledger(run_dir.ledger)
    until(lambda: ledger.task_counts().get("in_flight", 0) > 0)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 0
    counts = ledger.task_counts()
    assert "in_flight" not in counts
    assert counts.get("pending", 0) > 0
    assert read_beats(run_dir.beats) == {}
    assert [event.kind for event in ledger.journal.events()][-1] == "stopped"
    stand_in.delay_s = 0.0
    assert ended(start(), trainer) == 0
    assert ledger.task_counts()["trained"] == 12
    ledger.close()


def test_a_run_goes_on_after_kill_9(run_dir, stand_in, trainer, settings, write_config, start):
    write_config({**settings, "max_steps": 6, "eval": {"num_examples": 0}})
    stand_in.delay_s = 0.05
    ledger = Ledger(run_dir.ledger)
    for step in (2, 4):
        process = start()
        until(lambda step=step: ledger.batch(step) is not None, trainer)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert ended(start(), trainer) == 0
    counts = ledger.task_counts()
    assert counts["trained"] == 24
    assert {name.split(":")[0] for name in counts} <= {"trained", "dropped"}
    assert [batch.trainings for batch in ledger.batches()] == [1] * 6
    assert "resumed" in {event.kind for event in ledger.journal.events()}
    ledger.close()


def test_a_lost_engine_is_waited_for_and_used_again(run_dir, stand_in, trainer, settings, write_config, start):
    write_config({**settings, "max_steps": 6, "eval": {"num_examples": 0}})
    stand_in.delay_s = 0.05
    process = start()
    ledger = Ledger(run_dir.ledger)
    until(lambda: ledger.batch(2) is not None, trainer)
    stand_in.stop()
    until(lambda: any(wait.edge == "inference" for wait in waits_of(read_beats(run_dir.beats))), trainer)
    stand_in.version = 0
    stand_in.start()
    assert ended(process, trainer) == 0
    assert ledger.task_counts()["trained"] == 24
    assert "dropped:errors" not in ledger.task_counts()
    ledger.close()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"group_size": 1}, "set group_size to at least 2"),
        ({"max_stepz": 1}, "max_stepz: Extra inputs are not permitted"),
        ({"envs": [{"id": "no-such-environment"}]}, "no-such-environment"),
    ],
)
def test_the_users_mistake_is_one_line_and_exit_code_2(change, line, stand_in, settings, write_config, start):
    write_config({**settings, **change})
    process = start()
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2
    (last,) = [text for text in errors.splitlines() if text.startswith("mettle orchestrator:")]
    assert line in last
    assert "Traceback" not in errors


def test_an_engine_that_refuses_the_weights_is_exit_code_3(stand_in, trainer, settings, write_config, start):
    write_config(settings)
    stand_in.canary_diff = 0.5
    process = start()
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 3
    assert "refused 3 times" in errors
    assert "Traceback" not in errors


def test_other_data_than_the_run_began_with_is_refused_before_anything_is_changed(
    run_dir, stand_in, trainer, settings, write_config, start
):
    write_config({**settings, "max_steps": 1})
    assert ended(start(), trainer) == 0
    ledger = Ledger(run_dir.ledger, is_read_only=True)
    before = ledger.task_counts()
    settings["envs"][0]["args"]["num_train"] = 40
    write_config({**settings, "max_steps": 2})
    process = start()
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2
    assert "had 50 tasks when the run began and has 40 now" in errors
    assert ledger.task_counts() == before
    ledger.close()
