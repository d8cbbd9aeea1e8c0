"""Figures of a run elsewhere: each step once, by the real packages where they are installed."""

import json

import pytest

from mettle.errors import UserError
from mettle.records.versions import WeightVersion
from mettle.runs.config import RunConfig
from mettle.runs.tracking import Mirror, TrackingConfig, make_trackers
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir


class Notebook:
    """A tracker that keeps what it is told."""

    def __init__(self, fails_at=None):
        self.seen = []
        self.is_closed = False
        self._fails_at = fails_at

    def log(self, step, figures, at):
        if step == self._fails_at:
            raise OSError("the network is down")
        self.seen.append((step, figures))

    def close(self):
        self.is_closed = True


@pytest.fixture
def run_dir(tmp_path):
    made = RunDir(tmp_path / "run")
    made.path.mkdir()
    Ledger(made.ledger).close()
    return made


def train(run_dir, *steps):
    ledger = Ledger(run_dir.ledger)
    for step in steps:
        ledger.ship(step, f"d{step}", (), num_sequences=1, num_tokens=1, staleness=(0.0, 0), orchestrator_state={})
        ledger.record_trained(step, WeightVersion(step, "w", f"w{step}"), ())
        ledger.journal.record_metrics(step, {"reward/mean": step / 10, "loss/total": -0.5})
    ledger.close()


def mirrored(run_dir, **trackers):
    with Mirror(run_dir, {name: (lambda made=made: made) for name, made in trackers.items()}) as mirror:
        pass
    return mirror


def test_each_trained_step_is_handed_on_once_also_over_a_restart(run_dir):
    first, second = Notebook(), Notebook()
    train(run_dir, 1, 2)
    mirrored(run_dir, own=first)
    train(run_dir, 3)
    mirrored(run_dir, own=second)
    assert [step for step, _ in first.seen] == [1, 2]
    assert first.seen[1][1] == {"reward/mean": 0.2, "loss/total": -0.5}
    assert [step for step, _ in second.seen] == [3]
    assert second.is_closed


def test_a_tracker_that_fails_is_named_and_the_others_go_on(run_dir):
    ill, well = Notebook(fails_at=2), Notebook()
    train(run_dir, 1, 2, 3)
    mirror = mirrored(run_dir, ill=ill, well=well)
    assert [step for step, _ in well.seen] == [1, 2, 3]
    assert "tracking by ill has ended: OSError: the network is down" in mirror.failures["ill"]
    ledger = Ledger(run_dir.ledger)
    assert [event.message for event in ledger.journal.events(kind="warning")] == [mirror.failures["ill"]]
    ledger.close()


def test_prometheus_reads_the_newest_step(run_dir, tmp_path):
    parser = pytest.importorskip("prometheus_client.parser", reason="extra serve is not installed")
    path = tmp_path / "mettle.prom"
    train(run_dir, 1, 2)
    with Mirror(run_dir, make_trackers(TrackingConfig(prometheus=path), run_dir, {})):
        pass
    samples = [s for family in parser.text_string_to_metric_families(path.read_text()) for s in family.samples]
    found = {sample.name: (sample.labels, sample.value) for sample in samples}
    assert found["mettle_run_reward_mean"] == ({"run": "run"}, 0.2)
    assert found["mettle_run_step"][1] == 2.0


def test_tensorboard_reads_what_was_written(run_dir):
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="extra tracking is not installed"
    )
    train(run_dir, 1, 2)
    with Mirror(run_dir, make_trackers(TrackingConfig(tensorboard=True), run_dir, {})):
        pass
    found = reader.EventAccumulator(str(run_dir.path / "tensorboard"))
    found.Reload()
    assert [(s.step, round(s.value, 6)) for s in found.Scalars("reward/mean")] == [(1, 0.1), (2, 0.2)]


@pytest.mark.nightly
def test_weights_and_biases_keeps_a_run_offline(run_dir):
    pytest.importorskip("wandb", reason="extra tracking is not installed")
    config = TrackingConfig.model_validate({"wandb": {"project": "p", "mode": "offline"}})
    train(run_dir, 1, 2)
    with Mirror(run_dir, make_trackers(config, run_dir, {"max_steps": 2})) as mirror:
        pass
    assert mirror.failures == {}
    assert list((run_dir.path / "wandb").glob("offline-run-*/*.wandb"))
    assert json.loads((run_dir.path / "tracking.json").read_text()) == {"wandb": 2}


def test_what_cannot_be_done_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"names in \.prom alone"):
        TrackingConfig(prometheus=tmp_path / "figures.txt").check()
    tree = {"orchestrator": {"envs": [{"id": "words"}]}, "tracking": {"wandb": {"project": ""}}}
    with pytest.raises(ValueError, match="project"):
        RunConfig.model_validate(tree)
