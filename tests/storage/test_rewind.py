"""A ledger cut back to a step goes on from there as it did the first time."""

import pytest

from mettle.errors import StorageError
from mettle.orchestrator.config import OrchestratorConfig
from mettle.orchestrator.simulator import SimulatedWorld, simulate
from mettle.processes.virtual_time import run_virtually
from mettle.records.tasks import TaskState
from mettle.storage.evals import read_evals
from mettle.storage.ledger import Ledger
from mettle.storage.rewind import rewind
from mettle.storage.run_dir import RunDir

STEPS = 6
OPTIONS = {
    "max_steps": STEPS,
    "batch_size": 8,
    "group_size": 4,
    "envs": [{"id": "words"}, {"id": "sums", "ratio": 0.5}],
    "eval": {"num_examples": 3, "interval": 2},
    "max_staleness": 0,
    "max_lag": 0,
}
WORLD = SimulatedWorld(equal_rate=0.3, error_rate=0.1)


def train(folder, **overrides):
    """Begin a simulated run, or go on with it; its ledger."""
    run_virtually(simulate(folder, OrchestratorConfig.model_validate(OPTIONS | overrides), WORLD))
    return Ledger(RunDir(folder).ledger)


def batches(ledger):
    return [(row.step, row.digest) for row in ledger.batches()]


@pytest.mark.parametrize("step", [0, 1, 3, 5])
def test_a_run_in_which_nothing_stale_is_trained_repeats_itself_from_any_step(tmp_path, step):
    ledger = train(tmp_path / "run")
    first = batches(ledger)
    evals = [(row.kind, row.step, row.mean) for row in read_evals(ledger.database)]
    rewind(ledger, step)
    assert batches(ledger) == first[:step]
    assert {row.step for row in read_evals(ledger.database)} <= set(range(step + 1))
    assert {name for name, _ in ledger.task_counts().items()} <= {
        "trained", "scored", "pending", "dropped:zero_advantage", "dropped:error",
    }  # fmt: skip
    ledger.close()
    again = train(tmp_path / "run")
    assert batches(again) == first
    assert [(row.kind, row.step, row.mean) for row in read_evals(again.database)] == evals
    assert again.trained_more_than_once() == 0
    again.close()


@pytest.mark.parametrize("step", [1, 4])
def test_a_run_goes_on_from_a_step_with_a_batch_of_another_size_and_loses_no_task(tmp_path, step):
    ledger = train(tmp_path / "run", max_lag=1, max_staleness=2)
    rewind(ledger, step)
    kept = batches(ledger)
    waiting = [draw.draw_id for state in (TaskState.SCORED, TaskState.PENDING) for draw in ledger.tasks_in(state)]
    ledger.close()
    again = train(tmp_path / "run", max_lag=1, max_staleness=2, batch_size=16)
    assert batches(again)[:step] == kept
    assert len(batches(again)) == STEPS
    assert again.trained_more_than_once() == 0
    states = dict(again.database.rows("SELECT draw_id, state FROM tasks"))
    assert {states[draw_id] for draw_id in waiting} <= {"trained", "dropped"}
    assert sorted(states) == list(range(1, len(states) + 1))
    again.close()


def test_what_came_after_is_gone_from_metrics_versions_and_events(tmp_path):
    ledger = train(tmp_path / "run")
    rewind(ledger, 2)
    assert ledger.newest_version().weights.version == 2
    assert max(step for name in ledger.journal.metric_names() for step, _ in ledger.journal.metric(name)) == 2
    assert ledger.journal.fact("state") is None
    assert ledger.journal.fact("datasets") == {"words": 40, "sums": 40}
    text = " ".join(event.message for event in ledger.journal.events())
    assert "v4" not in text
    ledger.close()


def test_a_step_that_was_not_trained_is_refused_and_nothing_is_changed(tmp_path):
    ledger = train(tmp_path / "run")
    before = batches(ledger)
    with pytest.raises(StorageError, match="step 9 has not been trained"):
        rewind(ledger, 9)
    assert batches(ledger) == before
    ledger.close()
