"""A step repeated from its batch: the same bytes, and what other settings change."""

import pytest

from mettle.storage.batches import read_batch
from mettle.storage.weights import read_version
from mettle.trainer.config import OptimConfig, TrainerConfig, read_config
from mettle.trainer.losses.gspo import GspoLoss
from mettle.trainer.replay import Start, replay_step


@pytest.fixture
def trained(make_run, train_here, ledger_of):
    """A run of four steps with a checkpoint after the second, and what replay asks of it."""
    run_dir = make_run(shipped=4, max_steps=4, interval=2)
    config = read_config(run_dir.config("trainer"), TrainerConfig)
    batches = {row.step: read_batch(run_dir.batches, row.digest) for row in ledger_of(run_dir).batches()}
    train_here(run_dir)
    digests = {row.step: row.weights_digest for row in ledger_of(run_dir).batches()}

    def repeat(step, start=0, other=None):
        folder = run_dir.checkpoints / f"step-{start}" / "trainer" if start else None
        return replay_step(
            config, Start(start, folder), step, model=run_dir.model, batch_of=batches.__getitem__,
            recorded=digests.get, other=other,
        )  # fmt: skip

    return run_dir, config, repeat


@pytest.mark.parametrize(("step", "start"), [(1, 0), (3, 2), (4, 2), (4, 0)])
def test_a_step_makes_the_published_bytes_from_a_checkpoint_and_from_the_initial_policy(trained, step, start):
    run_dir, _, repeat = trained
    replay = repeat(step, start)
    assert replay.differing == ()
    assert replay.same.digest == read_version(run_dir.version(step)).digest


def test_the_same_settings_as_other_ones_change_nothing(trained):
    _, config, repeat = trained
    replay = repeat(3, 2, other=config)
    assert replay.other.digest == replay.same.digest
    assert (replay.distance, replay.other.metrics) == (0.0, replay.same.metrics)
    first = repeat(1, other=config)
    assert first.other.digest == first.same.digest


def test_another_rate_moves_the_weights_by_another_length_along_the_same_gradient(trained):
    _, config, repeat = trained
    optim = OptimConfig(**{**config.optim.model_dump(), "lr": config.optim.lr / 2})
    replay = repeat(3, 2, other=config.model_copy(update={"optim": optim}))
    same, other = replay.same.metrics, replay.other.metrics
    assert other["optim/lr"] == same["optim/lr"] / 2
    assert other["optim/grad_norm"] == same["optim/grad_norm"]
    assert other["update/norm"] == pytest.approx(same["update/norm"] / 2, rel=1e-3)
    assert replay.distance == pytest.approx(same["update/norm"] / 2, rel=1e-3)
    assert replay.differing == (), "what if says nothing of the run"


def test_another_loss_and_other_moments_take_another_step(trained):
    _, config, repeat = trained
    gspo = repeat(3, 2, other=config.model_copy(update={"loss": GspoLoss()}))
    assert gspo.other.metrics["optim/grad_norm"] != gspo.same.metrics["optim/grad_norm"]
    assert gspo.distance > 0
    optim = OptimConfig(**{**config.optim.model_dump(), "betas": (0.0, 0.999)})
    moments = repeat(3, 2, other=config.model_copy(update={"optim": optim}))
    assert moments.other.metrics["optim/grad_norm"] == moments.same.metrics["optim/grad_norm"]
    assert moments.distance > 0


def test_a_step_that_came_out_otherwise_is_named(trained, monkeypatch):
    _, _, repeat = trained
    monkeypatch.setattr("mettle.trainer.replay.weights_digest", lambda weights: "other")
    assert repeat(4, 2).differing == (3, 4)
