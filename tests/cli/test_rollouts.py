"""`mettle rl rollouts` on a run that the real ledger and shard writer wrote."""

from __future__ import annotations

import pytest
from tests.hub.conftest import RunWriter

from mettle.storage.ledger import Ledger


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A run of two steps."""
    writer = RunWriter(tmp_path_factory.mktemp("runs") / "words", steps=4, groups=2)
    for step in (1, 2):
        writer.train_step(step)
    writer.ledger.close()
    return writer.dir.path


def test_a_step_s_rollouts_are_listed_with_the_lowest_reward_first(mettle, words):
    found = mettle("rl", "rollouts", words, "--step", 2, "--kind", "train", "--sort", "reward", "--json").json
    rewards = [row["reward"] for row in found["rollouts"] if row["reward"] is not None]
    assert found["total"] == len(found["rollouts"]) == 16
    assert rewards == sorted(rewards)
    assert {row["step"] for row in found["rollouts"]} == {2}
    lines = mettle(
        "rl", "rollouts", words, "--step", 2, "--kind", "train", "--sort", "reward", "-n", 3
    ).out.splitlines()
    assert lines[0].split() == ["rollout", "step", "reward", "advantage", "tokens", "asked", "answered"]
    first = found["rollouts"][0]["rollout_id"]
    assert lines[1].split()[:2] == [first, "2"]
    assert lines[-2:] == ["3 of 16; -n 16 shows all", f"next: mettle rl rollouts {words} {first}"]


def test_a_rollout_is_shown_whole_with_its_tokens_and_siblings(mettle, words):
    row = mettle("rl", "rollouts", words, "--step", 1, "--kind", "train", "-n", 1, "--json").json["rollouts"][0]
    shown = mettle("rl", "rollouts", words, row["rollout_id"], "--tokens").out
    assert "user\n" in shown
    assert row["excerpt"] in shown
    assert f"rollout     {row['rollout_id']}" in shown
    detail = mettle("rl", "rollouts", words, row["rollout_id"], "--json").json
    (turn,) = detail["turns"]
    for text, logprob in zip(turn["tokens"]["texts"], turn["tokens"]["logprobs"], strict=True):
        assert f"{text!r}" in shown
        assert f"{logprob:.4f}" in shown
    siblings = {each["rollout_id"] for each in detail["siblings"]} - {row["rollout_id"]}
    assert len(siblings) == 7
    assert all(f"\n{name} " in shown for name in siblings)


def test_what_names_no_rollout_or_several_is_one_line(mettle, words):
    ended = mettle("rl", "rollouts", words, "nobody")
    assert (ended.code, ended.err) == (
        2,
        f"error: run {words} has no rollout 'nobody'; `mettle rl rollouts {words}` lists them\n",
    )
    names = sorted(row["rollout_id"] for row in mettle("rl", "rollouts", words, "-n", 99, "--json").json["rollouts"])
    start = next(name[:1] for name in names if sum(other.startswith(name[:1]) for other in names) > 1)
    ended = mettle("rl", "rollouts", words, start)
    assert ended.code == 2
    assert f"several rollouts of run {words} begin with {start!r}" in ended.err
    assert mettle("rl", "rollouts", words, "--tokens").code == 2


def test_a_list_of_none_says_which_condition_none_meets(mettle, words, tmp_path):
    ended = mettle("rl", "rollouts", words, "--words", "xyzzy", "--errors")
    assert ended.code == 0
    assert "is meant by --words xyzzy --errors\n" in ended.out
    Ledger(tmp_path / "empty" / "run.db").close()
    assert "has no rollouts yet" in mettle("rl", "rollouts", tmp_path / "empty").out
