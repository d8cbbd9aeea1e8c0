"""The questions, and what counts as an answer."""

from __future__ import annotations

import sys

import pytest

from mettle.envs import Parser, XMLParser, load_environment


@pytest.mark.parametrize(
    ("said", "score", "number"),
    [("19", 1, 1), (" +19 ", 1, 1), ("18", 0, 1), ("It is 19", 0, 0), ("", 0, 0), ("19.0", 0, 0), ("²", 0, 0)],
)
def test_only_the_number_itself_counts(said, score, number):
    load_environment("arithmetic")
    module = sys.modules["arithmetic"]
    plain, tagged = said, f"<think>hm</think><answer>{said}</answer>"
    for text, parser in ((plain, Parser()), (tagged, XMLParser(["answer"]))):
        completion = [{"role": "assistant", "content": text}]
        assert module.correct(completion, "19", parser) == score
        assert module.is_number(completion, parser) == number


def test_answers_are_right_and_splits_apart():
    env = load_environment("arithmetic", num_train=500, num_eval=100, max_value=30)
    for row in env.get_dataset():
        assert str(eval(row["question"])) == row["answer"]  # the questions are made by this package
    assert not set(env.get_dataset()["question"]) & set(env.get_eval_dataset()["question"])


@pytest.mark.parametrize("wrong", [{"operations": "/"}, {"operations": ""}, {"answer_format": "json"}])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(RuntimeError, match="not"):
        load_environment("arithmetic", **wrong)
    with pytest.raises(RuntimeError, match="raise max_value"):
        load_environment("arithmetic", max_value=3).get_dataset()
