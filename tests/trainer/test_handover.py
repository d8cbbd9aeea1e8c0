"""A large version is written beside the next step: the same bytes, and nobody waits for what waits for it."""

import threading
import time

import pytest
from tests.trainer.conftest import ALONE, ship_batch

from mettle.errors import StorageError
from mettle.storage.files import storage_errors
from mettle.storage.weights import read_version
from mettle.trainer import handover, publish
from mettle.trainer.config import MismatchConfig, TrainerConfig, read_config
from mettle.trainer.handover import PreparedVersion
from mettle.trainer.loop import StopFlag, Trainer

LIMIT_S = 120.0


@pytest.fixture
def beside(monkeypatch):
    """Every version counts as a large one."""
    monkeypatch.setattr(handover, "BESIDE_BYTES", 0)


def digests(run_dir, steps=3):
    return [read_version(run_dir.version(version)).digest for version in range(steps + 1)]


def test_what_is_written_beside_the_next_step_is_what_is_written_between_two(
    make_run, train_here, ledger_of, monkeypatch
):
    between = make_run("between")
    assert train_here(between) == 3
    monkeypatch.setattr(handover, "BESIDE_BYTES", 0)
    run_dir = make_run("beside")
    assert train_here(run_dir) == 3
    assert digests(run_dir) == digests(between)
    rows = ledger_of(run_dir).batches()
    assert [(row.trainings, row.weights_digest) for row in rows] == [(1, digest) for digest in digests(between)[1:]]


def test_the_next_pass_goes_on_while_a_version_is_written_and_its_step_waits(make_run, train_here, beside, monkeypatch):
    """The file of v1 is not written before a pass of step 2 has ended: who wrote first would wait for ever."""
    # Without looks at the mismatch, which settle a version first: they read what is published.
    run_dir, order, passed = make_run(mismatch=MismatchConfig(interval=0)), [], threading.Event()
    write, accumulate = publish.write_weights, Trainer.take_step
    writes = 0

    def slow(state, path):
        nonlocal writes
        writes += 1
        if writes == 2:  # v1; v0 was the first
            assert passed.wait(LIMIT_S)
        digest = write(state, path)
        order.append(f"written {writes}")
        return digest

    def take(self, step, digest, *, waited_s):
        progress = self.learner._on_progress

        def on_progress():
            if step == 2:
                order.append("pass of step 2")
                passed.set()
            progress()

        self.learner._on_progress = on_progress
        accumulate(self, step, digest, waited_s=waited_s)
        self.learner._on_progress = progress

    monkeypatch.setattr(publish, "write_weights", slow)
    monkeypatch.setattr(Trainer, "take_step", take)
    assert train_here(run_dir) == 3
    assert "written 2" in order, order
    assert order.index("pass of step 2") < order.index("written 2")
    assert len(set(digests(run_dir))) == 4


def test_a_version_is_committed_while_the_trainer_waits_for_a_batch_that_waits_for_it(make_run, ledger_of, beside):
    """As with `max_lag = 0`: the batch of step 2 is shipped when v1 is there."""
    run_dir = make_run(shipped=1, max_steps=2, interval=5)
    ledger = ledger_of(run_dir)

    def ship_when_published():
        from mettle.storage.ledger import Ledger

        own = Ledger(run_dir.ledger)
        deadline = time.monotonic() + LIMIT_S
        while own.newest_version() is None or own.newest_version().weights.version < 1:
            if time.monotonic() > deadline:
                own.journal.set_fact("state", "failed")  # the trainer ends, and the test with it
                break
            time.sleep(0.01)
        else:
            ship_batch(run_dir, own, 2)
        own.close()

    thread = threading.Thread(target=ship_when_published)
    thread.start()
    trainer = Trainer(run_dir, read_config(run_dir.config("trainer"), TrainerConfig), ALONE, ledger, StopFlag())
    assert trainer.run() == 2
    thread.join()


def test_what_keeps_a_version_from_being_written_is_told_to_who_settles(tmp_path):
    def write():
        with storage_errors(tmp_path, "writing weights"):
            raise OSError(28, "No space left on device")

    for is_beside in (True, False):
        version = PreparedVersion(write, is_beside=is_beside)
        with pytest.raises(StorageError, match="no space left while writing weights"):
            version.settle()
        assert version.ready()
