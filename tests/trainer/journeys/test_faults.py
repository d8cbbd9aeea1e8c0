"""kill -9 anywhere in a step: the resumed run ends in the same bytes, and every task is trained once."""

import os
import signal

import pytest
from tests.trainer.conftest import new_run, train

from mettle.storage import checkpoints as storage_checkpoints
from mettle.storage import weights as storage_weights
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.weights import read_version
from mettle.trainer import handover, keeper, loop
from mettle.trainer.uncompiled import UncompiledAdamW

STEPS = 5

# (what, owner of the name, name, die before or after it, at which call). With a checkpoint every two steps, the second
# or third call of each falls between two checkpoints or into one.
POINTS = [
    ("before the optimiser step", UncompiledAdamW, "step", "before", 3),
    ("after the optimiser step", UncompiledAdamW, "step", "after", 3),
    ("before publishing", loop, "prepare_version", "before", 4),
    ("with half a version folder", storage_weights, "write_json", "before", 4),
    ("after publishing, before the commit", handover.PreparedVersion, "settle", "after", 4),
    ("inside the commit", Ledger, "record_trained", "after", 3),
    ("after the commit", loop, "remove_versions_before", "before", 3),
    ("before the checkpoint", keeper, "write_checkpoint", "before", 1),
    ("with half a checkpoint", keeper, "save_learner", "after", 1),
    ("with a checkpoint without manifest", storage_checkpoints, "write_json", "before", 2),
    ("with half a second checkpoint", keeper, "save_learner", "after", 2),
    ("after the checkpoint", keeper, "write_checkpoint", "after", 2),
    ("while old checkpoints go", keeper, "remove_checkpoints", "before", 2),
    ("while publishing v0", loop, "prepare_version", "before", 1),
    ("in the first step", UncompiledAdamW, "step", "after", 1),
    ("at the very end", keeper, "write_checkpoint", "before", 3),
]


EACH_TIME = {
    "before the optimiser step", "with half a version folder", "inside the commit", "before the checkpoint",
    "with a checkpoint without manifest", "at the very end", "beside the next pass",
}  # fmt: skip
"""One of each kind of moment; the others are for the nightly tier."""


def points(among):
    return [
        pytest.param(point, id=point[0], marks=() if point[0] in EACH_TIME else pytest.mark.nightly) for point in among
    ]


def dying(function, when, at_call):
    calls = 0

    def wrapped(*arguments, **keywords):
        nonlocal calls
        calls += 1
        if when == "before" and calls == at_call:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **keywords)
        if when == "after" and calls == at_call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return wrapped


def train_and_die(train_here, run_dir, owner, name, when, at_call):
    """Train in a forked process that is killed at a point; returns the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            setattr(owner, name, dying(getattr(owner, name), when, at_call))
            train_here(run_dir)
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None


@pytest.fixture(scope="module")
def reference(tmp_path_factory, mini_model):
    run_dir = new_run(RunDir(tmp_path_factory.mktemp("reference") / "run"), mini_model, shipped=STEPS, max_steps=STEPS)
    train(run_dir)
    return [read_version(run_dir.version(version)).digest for version in range(STEPS + 1)]


BESIDE = [
    ("with half a version folder", storage_weights, "write_json", "before", 3),
    ("beside the next pass", UncompiledAdamW, "step", "before", 3),
    ("with a version before its commit", handover.PreparedVersion, "settle", "after", 3),
    ("after its commit", loop, "remove_versions_before", "before", 2),
]


@pytest.mark.parametrize("point", points(BESIDE))
def test_a_trainer_killed_with_a_version_under_way_resumes_to_the_same_bytes(
    point, reference, make_run, train_here, ledger_of, monkeypatch
):
    monkeypatch.setattr(handover, "BESIDE_BYTES", 0)
    test_a_killed_trainer_resumes_to_the_same_bytes(point, reference, make_run, train_here, ledger_of)


COPIED = [
    ("with half a checkpoint", keeper, "outcome", "before", 1),
    ("with its files written", keeper, "outcome", "after", 2),
    ("beside the next pass", UncompiledAdamW, "step", "before", 3),
    ("without its manifest", storage_checkpoints, "write_json", "before", 2),
]


@pytest.mark.nightly
@pytest.mark.parametrize("point", COPIED, ids=lambda point: point[0])
def test_a_trainer_killed_with_a_checkpoint_under_way_resumes_to_the_same_bytes(
    point, reference, make_run, train_here, ledger_of, monkeypatch
):
    monkeypatch.setattr(keeper, "BESIDE_BYTES", 0)
    test_a_killed_trainer_resumes_to_the_same_bytes(point, reference, make_run, train_here, ledger_of)


@pytest.mark.parametrize("point", points(POINTS))
def test_a_killed_trainer_resumes_to_the_same_bytes(point, reference, make_run, train_here, ledger_of):
    run_dir = make_run(shipped=STEPS, max_steps=STEPS)
    assert train_and_die(train_here, run_dir, *point[1:]) == signal.SIGKILL
    assert train_here(run_dir) == STEPS
    ledger = ledger_of(run_dir)
    assert [read_version(run_dir.version(version)).digest for version in range(STEPS + 1)] == reference
    assert [row.weights.digest for row in ledger.versions()] == reference
    assert [row.weights_digest for row in ledger.batches()] == reference[1:]
    assert ledger.task_counts() == {"trained": 3 * STEPS}
    assert ledger.journal.events(kind="warning") == []
    assert [step for step, _ in ledger.journal.metric("loss/total")] == list(range(1, STEPS + 1))


def test_a_trainer_killed_again_and_again_still_arrives(reference, make_run, train_here, ledger_of):
    run_dir = make_run(shipped=STEPS, max_steps=STEPS)
    for _ in range(6):
        train_and_die(train_here, run_dir, UncompiledAdamW, "step", "after", 2)
    assert train_here(run_dir) == STEPS
    assert read_version(run_dir.version(STEPS)).digest == reference[-1]
    assert ledger_of(run_dir).task_counts() == {"trained": 3 * STEPS}


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_and_counted(make_run, train_here, ledger_of, monkeypatch):
    run_dir = make_run(shipped=3, max_steps=3)
    clip = loop.Learner.train.__globals__["clip_gradients"]
    norms = []

    def poisoned(parameters, max_norm):
        norms.append(clip(parameters, max_norm))
        if len(norms) == 2:
            parameters[0].grad.fill_(float("nan"))
            return clip(parameters, max_norm)
        return norms[-1]

    monkeypatch.setitem(loop.Learner.train.__globals__, "clip_gradients", poisoned)
    assert train_here(run_dir) == 3
    ledger = ledger_of(run_dir)
    digests = [row.weights.digest for row in ledger.versions()]
    assert digests[1] == digests[2] != digests[3]
    assert [value for _, value in ledger.journal.metric("optim/skipped")] == [0.0, 1.0, 0.0]
    assert [event.data["step"] for event in ledger.journal.events(kind="step_skipped")] == [2]
