"""When a trainer looks, and what it leaves for those who look at the run."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.trainer.conftest import make_batch, make_group, make_learner

from mettle.storage.batches import read_batch
from mettle.trainer.config import MismatchConfig
from mettle.trainer.mismatch.diagnosis import Comparer, MismatchFound
from mettle.trainer.mismatch.monitor import MismatchMonitor

WELL = MismatchFound(1e-7, 1e-6, 8, 2, 0, "", "", {})


def events_of(ledger):
    return [(e.kind, e.message) for e in ledger.journal.events() if e.kind.startswith("mismatch")]


def test_a_run_that_records_nonsense_is_told_so_in_the_events_the_metrics_and_the_facts(
    make_run, train_here, ledger_of
):
    run_dir = make_run(mismatch=MismatchConfig())
    assert train_here(run_dir) == 3
    journal = ledger_of(run_dir).journal
    kind, message = events_of(ledger_of(run_dir))[0]
    assert kind == "mismatch"
    assert "engine and trainer disagree on the same tokens" in message
    assert len(events_of(ledger_of(run_dir))) == 1  # it is no news at the second step
    assert [step for step, _ in journal.metric("mismatch/same_weights_mean_abs")] == [1, 2]
    fact = journal.fact("mismatch")
    assert fact["cause"] == "unknown"
    assert {"position", "turn", "version"} <= fact["table"].keys()


def test_a_look_changes_no_byte_of_the_weights(make_run, train_here, ledger_of):
    digests = []
    for name, interval in (("looked", 1), ("unseen", 0)):
        run_dir = make_run(name, shipped=2, max_steps=2, mismatch=MismatchConfig(interval=interval))
        train_here(run_dir)
        digests.append([ledger_of(run_dir).version(v).weights.digest for v in range(3)])
    assert digests[0] == digests[1]
    assert ledger_of(run_dir).journal.fact("mismatch") is None


@pytest.mark.parametrize(("interval", "steps"), [(0, []), (1, [1, 2, 3, 4, 5]), (5, [1, 2, 5])])
def test_it_looks_at_the_start_and_then_at_its_interval(mini_model, tmp_path, interval, steps, monkeypatch):
    monkeypatch.setattr(Comparer, "compare", lambda *_: WELL)  # no cause is looked for in what is drawn by lot
    monitor = MismatchMonitor(MismatchConfig(interval=interval), make_learner(mini_model), tmp_path, seed=0)
    batch = make_batch(make_group(np.random.default_rng(0)))
    batches = {step: dataclasses.replace(batch, step=step, versions=batch.versions + step - 1) for step in range(1, 6)}
    assert [step for step, own in batches.items() if monitor.look(step, own) is not None] == steps


@pytest.mark.parametrize(
    ("size", "dtype", "computes_short", "is_due"),
    [
        (1, torch.bfloat16, False, True),
        (1, torch.float32, False, True),
        (2, torch.float32, False, True),
        (2, torch.bfloat16, True, True),
        (2, torch.bfloat16, False, False),
    ],
)
def test_several_ranks_compare_where_they_compute_what_an_engine_does(tmp_path, size, dtype, computes_short, is_due):
    policy = SimpleNamespace(dtype=dtype, computes_short=computes_short)
    learner = SimpleNamespace(world=SimpleNamespace(size=size), policy=policy)
    assert MismatchMonitor(MismatchConfig(), learner, tmp_path, seed=0).is_due(1) is is_due


def test_before_a_step_the_network_holds_the_version_before(mini_model, tmp_path, monkeypatch):
    held = []

    class Recording:
        def __init__(self, learner, version, folders):
            held.append(version)

        def compare(self, sequences, tolerance):
            return WELL

    monkeypatch.setattr("mettle.trainer.mismatch.monitor.Comparer", Recording)
    monitor = MismatchMonitor(MismatchConfig(interval=1), make_learner(mini_model), tmp_path, seed=0)
    batch = make_batch(make_group(np.random.default_rng(0)))
    for step in (1, 2, 7):
        monitor.look(step, dataclasses.replace(batch, step=step))
    assert held == [0, 1, 6]


def test_it_tells_a_cause_once_and_when_it_is_gone(make_run, ledger_of):
    run_dir = make_run(shipped=1)
    ledger = ledger_of(run_dir)
    monitor = MismatchMonitor(MismatchConfig(), None, run_dir.weights, seed=0)
    ill = dataclasses.replace(WELL, cause="temperature", detail="it is another", affected=2)
    for step, found in enumerate((WELL, ill, ill, WELL, ill), 1):
        monitor.tell(ledger.journal, step, found)
    assert [kind for kind, _ in events_of(ledger)] == ["mismatch", "mismatch_gone", "mismatch"]


def test_versions_that_are_gone_are_not_compared(mini_model, make_run, tmp_path):
    run_dir = make_run(shipped=1)
    batch = read_batch(run_dir.batches, next(run_dir.batches.iterdir()).stem)
    monitor = MismatchMonitor(MismatchConfig(interval=1), make_learner(mini_model), tmp_path, seed=0)
    assert monitor.look(1, dataclasses.replace(batch, versions=np.where(batch.loss_mask, 7, -1))) is None
