"""The facts, the questions made from them, and what counts as an answer."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from mettle.envs import load_environment


@pytest.fixture
def module():
    load_environment("science-choice")
    return sys.modules["science_choice"]


def said(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("text", "score", "format_score"),
    [
        (r"so \boxed{B}", 1, 1),
        (r"<think>A? \boxed{A}</think> \boxed{B}", 1, 1),
        (r"\boxed{\text{B}}", 1, 1),
        (r"\boxed{(B)}", 1, 1),
        (r"\boxed{A}", 0, 1),
        (r"\boxed{A, B, C, D}", 0, 0),
        (r"\boxed{ABCD}", 0, 0),
        (r"\boxed{B} or \boxed{A}", 0, 1),
        (r"\boxed{H}", 0, 0),
        ("B", 0, 0),
        ("", 0, 0),
    ],
)
def test_only_the_letter_in_the_last_box_counts(module, text, score, format_score):
    parser = load_environment("science-choice").parser
    row = {"answer": "B", "info": {"choices": ["w", "x", "y", "z"]}}
    assert module.correct(said(text), row["answer"], parser) == score
    assert module.format_is_one_letter(said(text), row["info"], parser) == format_score


def test_a_fact_is_not_there_twice(module):
    for family in sys.modules["science_facts"].FAMILIES:
        lefts, rights = zip(*family.pairs, strict=True)
        assert len(set(lefts)) == len(lefts), family.name
        assert len(set(rights)) == len(rights), family.name


def test_splits_share_no_question_and_choices_differ():
    env = load_environment("science-choice", num_train=2000, num_eval=400)
    train, evaluation = env.get_dataset(), env.get_eval_dataset()
    assert len(train) == 2000
    assert len(evaluation) == 400
    assert not {q.splitlines()[0] for q in train["question"]} & {q.splitlines()[0] for q in evaluation["question"]}
    for row in [*train, *evaluation]:
        choices = row["info"]["choices"]
        assert len(set(choices)) == len(choices) >= 2
        assert "ABCDEFGHIJ".index(row["answer"]) < len(choices)


def test_no_letter_is_worth_guessing():
    counts = Counter(load_environment("science-choice").get_dataset()["answer"])
    assert set(counts) == set("ABCD")
    assert max(counts.values()) < 1.25 * min(counts.values())


def test_numbers_are_worked_out_as_the_question_says(module):
    by_question = {}
    rng = __import__("random").Random(1)
    for _ in range(500):
        question, value, slips, unit = module.formula_question(rng)
        by_question[question] = (value, unit)
        assert sum(module.number(slip) != module.number(value) for slip in slips) >= 2
    for question, (value, unit) in by_question.items():
        if question.startswith("What is the kinetic energy of"):
            mass, speed = [int(word) for word in question.split() if word.isdigit()]
            assert (value, unit) == (mass * speed**2 / 2, "J")


def test_public_datasets_are_brought_into_the_same_shape(module, monkeypatch):
    datasets = pytest.importorskip("datasets")
    arc = {"question": "Which?", "choices": {"text": ["a", "b", "c"], "label": ["1", "2", "3"]}, "answerKey": "2"}
    sciq = {"question": "Who?", "correct_answer": "y", "distractor1": "n", "distractor2": "o", "distractor3": "p"}
    rows = {"allenai/ai2_arc": arc, "allenai/sciq": sciq}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *_, **__: datasets.Dataset.from_list([rows[name]] * 3))
    for source, right in (("arc", "b"), ("sciq", "y")):
        env = load_environment("science-choice", source=source, num_train=3, num_eval=2)
        row = env.get_dataset()[0]
        assert row["info"]["choices"]["ABCD".index(row["answer"])] == right


@pytest.mark.parametrize("wrong", [{"subjects": ["alchemy"]}, {"source": "web"}, {"num_choices": 1}])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(RuntimeError, match="not"):
        load_environment("science-choice", **wrong)
