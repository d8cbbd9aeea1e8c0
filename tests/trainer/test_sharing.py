"""Several runs on one base: the bytes of each alone, and what is wrong with one is that one's."""

import functools
import gc
import os
import signal
import threading
import weakref
from concurrent.futures import FIRST_COMPLETED, wait

import numpy as np
import pytest
from tests.trainer.conftest import ALONE, make_batch, new_run, ship_batch, train

from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.share_dir import Membership, ShareDir
from mettle.storage.weights import read_version
from mettle.trainer import checkpoint, loop, sharing
from mettle.trainer.config import LoraConfig, MismatchConfig, OptimConfig, TrainerConfig
from mettle.trainer.loop import StopFlag
from mettle.trainer.sharing import SharedTrainer
from mettle.trainer.uncompiled import UncompiledAdamW

STEPS = 3
LORAS = {
    "a": LoraConfig(rank=4, alpha=8),
    "b": LoraConfig(rank=2, alpha=4, target_modules=("q_proj", "v_proj")),
    "c": LoraConfig(rank=4, alpha=8),
    "d": LoraConfig(rank=8, alpha=8, mlp=False),
}


@pytest.fixture(autouse=True)
def looks_at_every_turn(monkeypatch):
    monkeypatch.setattr(sharing, "LOOK_S", 0.0)


def lora_run(folder, model, name, *, shipped=STEPS, **changes):
    seed = ord(name[-1])
    settings = {"shipped": 0, "max_steps": STEPS, "lora": LORAS[name[-1]], "seed": seed, **changes}
    run_dir = new_run(RunDir(folder / name), model, **settings)
    ledger = Ledger(run_dir.ledger)
    for step in range(1, shipped + 1):
        ship_batch(run_dir, ledger, step, seed=seed, num_groups=1 + seed % 3)
    ledger.close()
    return run_dir


@pytest.fixture
def make_lora_run(tmp_path, mini_model):
    return functools.partial(lora_run, tmp_path, mini_model)


@pytest.fixture
def share(tmp_path, mini_model):
    found = ShareDir(tmp_path / "share")
    found.path.mkdir()
    found.model.symlink_to(mini_model)
    return found


def member(run_dir, life="1"):
    return Membership(run_dir.name, run_dir.path, life)


def shared_trainer(share, num_at_once=1):
    return SharedTrainer(share, TrainerConfig(lora=LoraConfig()), ALONE, StopFlag(), num_at_once=num_at_once)


def train_out(share, *run_dirs, life="1", num_at_once=1):
    """Train until all of these runs are done or have failed; their words by name."""
    trainer = shared_trainer(share, num_at_once)
    for run_dir in run_dirs:
        share.join(member(run_dir, life))
    for _ in range(200):
        if not trainer.turn():
            wait([each.running for each in trainer.tenants.values() if each.running], return_when=FIRST_COMPLETED)
        words = {run_dir.name: share.told(member(run_dir, life)) for run_dir in run_dirs}
        if all(word is not None and word.state != "training" for word in words.values()):
            return words
    raise AssertionError(words)


def digests(run_dir):
    return [read_version(run_dir.version(version)).digest for version in range(STEPS + 1)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, mini_model):
    """What each run makes by itself."""

    @functools.cache
    def digests_of(name):
        run_dir = lora_run(tmp_path_factory.mktemp("alone"), mini_model, name)
        assert train(run_dir) == STEPS
        return digests(run_dir)

    return digests_of


def test_a_run_beside_three_others_makes_the_bytes_that_it_makes_alone(share, make_lora_run, alone, ledger_of):
    run_dirs = [make_lora_run(name) for name in LORAS]
    words = train_out(share, *run_dirs)
    assert {name: (word.state, word.step) for name, word in words.items()} == {name: ("done", STEPS) for name in LORAS}
    for run_dir in run_dirs:
        assert digests(run_dir) == alone(run_dir.name), run_dir.name
        assert [row.trainings for row in ledger_of(run_dir).batches()] == [1] * STEPS
        assert [path.name for path in sorted(run_dir.checkpoints.iterdir())] == ["step-2", "step-3"]


def test_runs_that_are_trained_side_by_side_make_the_bytes_that_they_make_alone(
    share, make_lora_run, alone, monkeypatch
):
    both = threading.Barrier(2)
    advance = sharing.Trainer.advance

    def meet(self, step, digest, *, waited_s):
        if step == 1:
            both.wait(60)  # broken, and the run failed, if one is trained after the other
        advance(self, step, digest, waited_s=waited_s)

    run_dirs = [make_lora_run(name) for name in ("b", "c")]
    with monkeypatch.context() as patched:
        patched.setattr(sharing.Trainer, "advance", meet)
        words = train_out(share, *run_dirs, num_at_once=2)
    assert {word.state for word in words.values()} == {"done"}, words
    for run_dir in run_dirs:
        assert digests(run_dir) == alone(run_dir.name), run_dir.name


@pytest.mark.parametrize("num_at_once", [1, 2], ids=["by turns", "side by side"])
def test_a_run_that_is_done_leaves_nothing_of_its_adapter_in_memory(share, make_lora_run, monkeypatch, num_at_once):
    kept = []
    learner_on = sharing.learner_on

    def note(*arguments, **options):
        learner = learner_on(*arguments, **options)
        kept.extend(weakref.ref(each) for each in (learner, learner.tenant.optimizer, *learner.tenant.trained))
        return learner

    monkeypatch.setattr(sharing, "learner_on", note)
    trainer = shared_trainer(share, num_at_once)
    run_dir = make_lora_run("a")
    share.join(member(run_dir))
    gc.disable()  # it would come, but nobody knows when
    try:
        for _ in range(200):
            if not trainer.turn():
                wait([each.running for each in trainer.tenants.values() if each.running])
            if kept and not trainer.tenants:
                break
        assert share.told(member(run_dir)).state == "done"
        assert [each() for each in kept if each() is not None] == []
    finally:
        gc.enable()


def test_nothing_is_trained_beside_a_look_into_the_network(share, make_lora_run, monkeypatch):
    inside, beside = set(), []
    advance = sharing.Trainer.advance

    def note(self, step, digest, *, waited_s):
        inside.add(self)
        beside.append((self.wants_network_alone(step), len(inside)))
        advance(self, step, digest, waited_s=waited_s)
        inside.discard(self)

    monkeypatch.setattr(sharing.Trainer, "advance", note)
    words = train_out(share, make_lora_run("b", mismatch=MismatchConfig()), make_lora_run("d"), num_at_once=2)
    assert {word.state for word in words.values()} == {"done"}, words
    assert [count for is_alone, count in beside if is_alone] == [1, 1]


def test_runs_take_turns_by_their_tokens(share, make_lora_run, monkeypatch):
    monkeypatch.setattr(sharing, "QUANTUM_TOKENS", 16)
    order = []
    advance = sharing.Trainer.advance

    def note(self, step, digest, *, waited_s):
        order.append(self.run_dir.name)
        advance(self, step, digest, waited_s=waited_s)

    monkeypatch.setattr(sharing.Trainer, "advance", note)
    train_out(share, make_lora_run("a"), make_lora_run("c"))
    assert order.count("a") == order.count("c") == STEPS
    assert set(order[:3]) == {"a", "c"}  # and not all of one first


def test_a_torn_batch_fails_its_run_alone(share, make_lora_run, alone, ledger_of):
    run_dirs = [make_lora_run(name) for name in ("a", "b")]
    torn = ledger_of(run_dirs[1]).batch(2)
    path = run_dirs[1].batches / f"{torn.digest}.npz"
    path.write_bytes(path.read_bytes()[:-40])
    words = train_out(share, *run_dirs)
    assert (words["a"].state, words["a"].step) == ("done", STEPS)
    assert (words["b"].state, words["b"].step, words["b"].code) == ("failed", 1, 2)
    assert torn.digest[:12] in words["b"].message
    assert digests(run_dirs[0]) == alone("a")


def test_a_gradient_that_is_not_finite_is_one_runs_own(share, make_lora_run, alone, ledger_of):
    healthy, sick = make_lora_run("a"), make_lora_run("c", shipped=1)
    ledger = ledger_of(sick)
    with pytest.MonkeyPatch.context() as patch:

        def broken(samples, **keywords):
            samples[0]["advantages"] = np.where(samples[0]["loss_mask"], np.float32("nan"), np.float32(0.0))
            return make_batch(samples, **keywords)

        patch.setattr("tests.trainer.conftest.make_batch", broken)
        for step in (2, 3):
            ship_batch(sick, ledger, step)
    words = train_out(share, healthy, sick)
    assert words["a"].state == "done"
    assert digests(healthy) == alone("a")
    assert len(set(digests(sick)[1:])) == 1  # its steps changed nothing after the first


def test_a_run_that_cannot_begin_is_told_why_and_the_others_train(share, make_lora_run):
    healthy, missing = make_lora_run("a"), make_lora_run("b")
    missing.config("trainer").unlink()
    words = train_out(share, healthy, missing)
    assert words["a"].state == "done"
    assert (words["b"].state, words["b"].code) == ("failed", 2)
    assert "trainer.json is missing" in words["b"].message


def test_a_run_that_left_goes_on_where_it_was(share, make_lora_run, alone, ledger_of):
    run_dir = make_lora_run("a", shipped=1)
    trainer = shared_trainer(share)
    share.join(member(run_dir))
    while (word := share.told(member(run_dir))) is None or word.step < 1:
        trainer.turn()
    share.leave(member(run_dir))
    trainer.turn()
    assert not trainer.tenants
    assert (run_dir.checkpoints / "step-1").exists()  # between two of its interval
    for step in (2, 3):
        ship_batch(run_dir, ledger_of(run_dir), step, seed=ord("a"), num_groups=1 + ord("a") % 3)
    words = train_out(share, run_dir, life="2")
    assert words["a"].state == "done"
    assert digests(run_dir) == alone("a")
    assert [row.trainings for row in ledger_of(run_dir).batches()] == [1] * STEPS


POINTS = [
    ("before the optimiser step", UncompiledAdamW, "step", 3),
    ("before publishing", loop, "prepare_version", 5),
    ("inside the commit", Ledger, "record_trained", 3),
    ("with half a checkpoint", checkpoint, "save_tenant", 2),
]


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=[] if point in POINTS[1::2] else [pytest.mark.nightly], id=point[0])
        for point in POINTS
    ],
)
def test_after_a_kill_every_run_goes_on_to_its_own_bytes(point, share, make_lora_run, alone, ledger_of):
    run_dirs = [make_lora_run(name) for name in ("a", "b")]
    _, owner, name, at_call = point
    pid = os.fork()
    if pid == 0:
        try:
            setattr(owner, name, _dying(getattr(owner, name), at_call))
            train_out(share, *run_dirs)
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    words = train_out(share, *run_dirs)
    assert [word.state for word in words.values()] == ["done"] * 2
    for run_dir in run_dirs:
        assert digests(run_dir) == alone(run_dir.name), run_dir.name
        ledger = ledger_of(run_dir)
        assert not ledger.journal.events(kind="warning")  # none of them made other weights the second time


def _dying(function, at_call):
    calls = 0

    def wrapped(*arguments, **keywords):
        nonlocal calls
        calls += 1
        if calls == at_call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **keywords)

    return wrapped


def test_options_of_one_run_do_not_reach_another(share, make_lora_run, alone):
    quick = make_lora_run("a")
    slow = make_lora_run("c")
    config = TrainerConfig.model_validate_json(slow.config("trainer").read_text())
    slow.config("trainer").write_text(
        config.model_copy(update={"optim": OptimConfig(lr=1e-6, weight_decay=0.5)}).model_dump_json()
    )
    train_out(share, quick, slow)
    assert digests(quick) == alone("a")
    assert digests(slow) != alone("c")
