"""What short answers mean, near misses of them, and the recipes that tell both apart."""

from __future__ import annotations

from typing import Any

import pytest

import mettle.envs as vf
from mettle.quality.answer_values import as_date, as_items, as_roman, as_time, as_version, as_words, as_written
from mettle.quality.data.formats import AnswerFormat
from mettle.quality.data.recipes import recipe_for
from mettle.quality.rewards.golds import Gold, wrong_answers
from mettle.quality.rewards.near_misses import near_misses, roman


@pytest.mark.parametrize(
    ("read", "same", "others"),
    [
        (as_date, ["2024-03-05", "March 5, 2024", "5th of March 2024", "Tue, Mar 5 2024", "5.3.2024", "03/05/2024"],
         ["2024-03-06", "2023-03-05", "2024-05-03", "March 2024", "5 March", "2024-03-05 10:00"]),
        (as_date, ["13/05/2024", "05/13/2024", "13 May 2024"], ["2024-02-30", "32 May 2024", "in May", ""]),
        (as_time, ["14:30", "2:30 PM", "2:30 p.m.", "at 14:30"], ["2:30", "14:31", "14:30:01", "25:00", "13:00 pm", "3"]),
        (as_version, ["1.10", "v1.10", "version 1.10"], ["1.1", "1.10.0", "1.10rc1", "1.9", "10"]),
        (as_roman, ["XIV", "xiv", " XIV. "], ["XVI", "IIII", "14", "", "VX"]),
        (as_items, ["a, b, c", "a -> b -> c", "1. a\n2. b\n3. c", "[a, b, c]", "A; B; C", "a, b, and c"],
         ["b, a, c", "a, b", "a, b, c, d", "abc"]),
        (as_words, ["The Eiffel Tower", "eiffel  tower.", '"Eiffel Tower"'], ["Eiffel", "Eiffel Towers", "C++", "C"]),
        (as_written, ["NaCl", "'NaCl'."], ["NACL", "nacl"]),
    ],
)  # fmt: skip
def test_what_says_the_same_has_one_value_and_what_does_not_another(read, same, others):
    values = {read(text) for text in same}
    assert len(values) == 1
    assert None not in values
    assert not values & {read(text) for text in others}


def test_roman_numerals_are_read_as_they_are_written():
    assert [as_roman(roman(value)) for value in range(1, 4000)] == list(range(1, 4000))


@pytest.mark.parametrize(
    "text", ["1." * 50_000, "the " * 50_000, "M" * 100_000, "a ," * 50_000, "\n" * 100_000 + "xy z"]
)
def test_a_long_text_is_read_in_no_time_or_not_at_all(text):
    assert [read(text) for read in (as_date, as_time, as_version, as_roman)] == [None] * 4
    as_items(text)


@pytest.mark.parametrize(
    ("gold", "wanted"),
    [
        ("2021-03-04", {"other-day": "2021-03-05"}),
        ("March 31, 2024", {"other-day": "March 30, 2024"}),
        ("14:59", {"off-by-one": "14:58"}),
        ("v2.0.1", {"off-by-one": "v2.0.2"}),
        ("XIV", {"near-miss": "XEV", "off-by-one": "XV"}),
        ("Apollo 11", {"near-miss": "Apoleo 11", "off-by-one": "Apollo 12"}),
        ("42", {"near-miss": "43"}),
    ],
)
def test_near_misses_are_of_the_answers_kind(gold, wanted):
    assert near_misses(gold) == wanted


def test_an_order_and_a_case_are_wrong_only_where_they_are_asked_for():
    assert near_misses("a1, b2", is_ordered=True)["swapped-order"] == "b2, a1"
    assert "swapped-order" not in near_misses("a1, b2")
    assert wrong_answers(Gold("a", ("A", "b"), ()))["other-case"] == "A"
    assert "other-case" not in wrong_answers(Gold("a", ("b",), ()))
    assert "other-row" not in wrong_answers(Gold("2021-03-04", ("March 4, 2021",), ())), "it says the same"


ASKED = [
    ("date", "2021-03-04", ["March 4, 2021"], ["2021-03-05", "2020-03-04", "2021-03", ""]),
    ("time", "14:30", ["2:30 pm"], ["14:31", "2:30", ""]),
    ("version", "1.10", ["v1.10"], ["1.1", "1.10.1", ""]),
    ("roman", "XIV", ["xiv"], ["XVI", "14", ""]),
    ("list", "3, 1, 2", ["3,1,2", "3 -> 1 -> 2"], ["1, 3, 2", "3, 1", "3, 1, 2, 2", ""]),
    ("short", "Marie Curie", ["marie  curie."], ["Marie", "Pierre Curie", "Marie Curie and Pierre", ""]),
    ("date", "under Nero", ["Under Nero"], ["under Otho", "2021-03-04", ""]),
    ("numeric", "7 km", ["7 km"], ["7", "8 km", ""]),
    ("free-text", "two words", ["Two words!"], ["two", "words two", "two words more", ""]),
]


@pytest.mark.parametrize(("name", "answer", "right", "wrong"), ASKED)
def test_the_recipe_pays_the_right_answer_alone(name, answer, right, wrong):
    names: dict[str, Any] = {}
    recipe = recipe_for(AnswerFormat(name, 0.9, ()))
    exec(recipe.code(), names)
    parser = vf.XMLParser(["answer"])

    def paid(given, function="correct"):
        completion = [{"role": "assistant", "content": f"<answer>{given}</answer>"}]
        return names[function](completion, answer, parser)

    assert [paid(given) for given in [answer, *right]] == [1.0] * (1 + len(right))
    assert [paid(given) for given in wrong] == [0.0] * len(wrong)
    if "overlap" in names:
        assert [paid(given, "overlap") for given in wrong] == [0.0] * len(wrong), "too short to be paid in part"


def test_case_counts_where_answers_differ_in_nothing_else():
    names: dict[str, Any] = {}
    exec(recipe_for(AnswerFormat("short", 0.9, (), has_case=True)).code(), names)
    completion = [{"role": "assistant", "content": "<answer>a</answer>"}]
    assert [names["correct"](completion, gold, vf.XMLParser(["answer"])) for gold in "aA"] == [1.0, 0.0]
