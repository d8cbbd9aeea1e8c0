"""What a run is said to have gained, and over which environments."""

from __future__ import annotations

import pytest

from mettle.runs.summary import summarise, summary_lines
from mettle.storage.evals import EvalPlan, EvalStore
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.shards import ShardWriter


@pytest.fixture
def run(tmp_path):
    """(summary, its lines) of a run with evaluations as (kind, environment, step, mean)."""
    ledger = Ledger(tmp_path / "run.db")
    store = EvalStore(ledger.database, ShardWriter(RunDir(tmp_path).rollouts))

    def make(*evals):
        for kind, env, step, mean in evals:
            interval = None if mean is None else (mean - 0.1, mean + 0.1)
            store.end(store.begin(EvalPlan(kind, env, 4, 4, step)), mean=mean, interval=interval, metrics={})
        summary = summarise(ledger, tmp_path)
        return summary, summary_lines(summary, ledger)

    yield make
    ledger.close()


def test_one_environment_is_told_without_its_name(run):
    summary, lines = run(("baseline", "words", 0, 0.25), ("interim", "words", 2, 0.3), ("final", "words", 4, 0.5))
    assert (summary["baseline"]["mean"], summary["final"]["mean"], summary["gain"]) == (0.25, 0.5, 0.25)
    assert summary["baseline"]["ci"] == pytest.approx([0.15, 0.35])
    assert lines[0].startswith("baseline   0.250 [0.150, 0.350] on 0 tasks")
    assert lines[1].startswith("final      0.500")
    assert lines[2].startswith("gain       +0.250 ")


def test_several_environments_are_told_each_and_count_alike(run):
    summary, lines = run(
        ("baseline", "words", 0, 0.25), ("baseline", "sums", 0, 0.5), ("final", "words", 4, 0.75),
        ("final", "sums", 4, 0.25),
    )  # fmt: skip
    assert (summary["baseline"]["mean"], summary["final"]["mean"]) == (0.375, 0.5)
    assert summary["gain"] == pytest.approx(0.125)
    assert {env: found["mean"] for env, found in summary["final"]["envs"].items()} == {"words": 0.75, "sums": 0.25}
    assert [line[:22] for line in lines[:4]] == [
        "baseline   words: 0.25", "           sums: 0.500", "final      words: 0.75", "           sums: 0.250",
    ]  # fmt: skip
    assert lines[4].startswith("gain       words +0.500, sums -0.250 ")


def test_an_environment_without_a_reward_is_left_out_of_the_gain(run):
    summary, lines = run(
        ("baseline", "words", 0, 0.25), ("baseline", "sums", 0, None), ("final", "words", 4, 0.5),
        ("final", "sums", 4, 0.5),
    )  # fmt: skip
    assert summary["gain"] == 0.25
    assert "sums: no rollout has a reward" in lines[1]


def test_what_was_not_evaluated_has_no_figure(run):
    summary, lines = run()
    assert (summary["baseline"], summary["final"], summary["gain"]) == (None, None, None)
    assert lines[:2] == ["baseline   not evaluated", "final      not evaluated"]
