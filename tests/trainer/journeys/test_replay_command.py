"""`mettle rl replay`, as a person types it, on a run of a few steps."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mettle.cli import main
from mettle.orchestrator.config import OrchestratorConfig
from mettle.storage.batches import read_batch
from mettle.storage.weights import read_version
from mettle.trainer.config import write_config


@pytest.fixture
def trained(make_run, train_here):
    """A run of three steps with a checkpoint after the second."""
    run_dir = make_run(shipped=3, max_steps=3, interval=2)
    write_config(run_dir.config("orchestrator"), OrchestratorConfig(envs=[{"id": "words"}]))
    train_here(run_dir)
    return run_dir


@pytest.fixture
def replay(trained, capsys, monkeypatch, tmp_path):
    """Runs the command with these words; returns its exit code and what it wrote."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        capsys.readouterr()
        code = main.run(["rl", "replay", str(trained.path), *words])
        return code, *capsys.readouterr()

    return run


def test_a_step_is_repeated_bit_for_bit_and_what_another_rate_changes_is_a_table(trained, replay):
    code, out, err = replay("--step", "3")
    assert (code, err) == (0, "")
    first = out.splitlines()[0]
    digest = read_version(trained.version(3)).digest
    assert first.startswith(
        "step 3, repeated from the checkpoint of step 2: the same weights as in the run, bit for bit"
    )
    assert digest.startswith(first.rpartition("(")[2].rstrip(")"))

    code, out, _ = replay("--step", "3", "--lr", "5e-4", "--optim.max-grad-norm", "1e9", "--json")
    found = json.loads(out)
    assert (code, found["is_same"], found["weights_digest"]) == (0, True, digest)
    assert found["other"]["metrics"]["optim/lr"] == found["metrics"]["optim/lr"] / 2
    assert found["other"]["weights_digest"] != digest
    assert found["distance"] > 0

    code, out, _ = replay("--step", "3", "--loss", "gspo")
    assert code == 0
    assert "as in the run" in out
    assert "what if" in out


def test_a_step_that_makes_other_weights_than_the_run_has_is_exit_code_1(trained, replay, monkeypatch):
    def another(folder, digest):
        """As if the run had trained something else."""
        batch = read_batch(folder, digest)
        return replace(batch, advantages=-batch.advantages)

    monkeypatch.setattr("mettle.runs.replay.read_batch", another)
    code, out, err = replay("--step", "3")
    assert (code, err) == (1, "")
    assert out.startswith("step 3, repeated from the checkpoint of step 2: OTHER weights than in the run")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--step", "4"), "has no trained step 4: its trained steps are 1 to 3"),
        (("--step", "0"), "has no trained step 0"),
        (("--step", "2", "--loss", "gspq"), "gspo"),
        (("--step", "2", "--optim.lrr", "1"), "optim.lr"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(replay, words, said):
    code, out, err = replay(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
