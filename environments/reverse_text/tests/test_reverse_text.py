"""The words, the splits and the two rewards."""

from __future__ import annotations

import sys

import pytest

from mettle.envs import State, load_environment


@pytest.fixture(scope="module")
def module():
    load_environment("reverse-text")
    return sys.modules["reverse_text"]


@pytest.mark.parametrize(
    ("response", "score"),
    [("dcba", 1.0), (" dcba\n", 1.0), ("dcbx", 0.75), ("dcbaa", 0.8), ("dc", 0.5), ("", 0.0), ("abcd", 0.0)],
)
def test_position_counts_right_letters_of_the_longer(module, response, score):
    completion = [{"role": "assistant", "content": response}]
    assert module.position(completion, "dcba", State(is_truncated=False)) == pytest.approx(score)
    assert module.position(completion, "dcba", State(is_truncated=True)) == 0.0


def test_ratio_is_that_of_difflib(module):
    assert module.ratio([{"role": "assistant", "content": "dcb"}], "dcba") == pytest.approx(6 / 7)


@pytest.mark.parametrize(("hard", "letters", "lengths"), [(False, "abcdefghij", (3, 6)), (True, None, (4, 10))])
def test_words_are_what_was_asked_for(hard, letters, lengths):
    env = load_environment("reverse-text", hard=hard, num_train=300, num_eval=50)
    words = [row["question"].removeprefix("reverse ") for row in env.get_dataset()]
    assert len(set(words)) == 300
    assert {len(word) for word in words} == set(range(lengths[0], lengths[1] + 1))
    assert letters is None or set("".join(words)) <= set(letters)
    assert all(row["answer"] == word[::-1] for row, word in zip(env.get_dataset(), words, strict=True))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_splits_never_overlap_and_repeat_by_seed(seed):
    env = load_environment("reverse-text", seed=seed, num_train=1000, num_eval=200)
    train, held_out = set(env.get_dataset()["question"]), set(env.get_eval_dataset()["question"])
    other = set(load_environment("reverse-text", seed=seed + 1).get_eval_dataset()["question"])
    assert not train & (held_out | other)
    again = load_environment("reverse-text", seed=seed, num_train=1000, num_eval=200)
    assert again.get_dataset()["question"] == env.get_dataset()["question"]


def test_what_cannot_be_had_is_said(module, monkeypatch):
    with pytest.raises(RuntimeError, match="reward is one of"):
        load_environment("reverse-text", reward="vibes")
    monkeypatch.setattr(module, "EASY", ("ab", 1, 2))
    with pytest.raises(ValueError, match="not 7 different words"):
        module.make_rows(7, seed=0, for_eval=False, hard=False)
