"""Example datasets: the real ones read as they should, and what stands in for them says so."""

from __future__ import annotations

import importlib.util
import json
import re
import socket

import pytest

import mettle.envs as vf
from mettle.envs import datasets as module
from mettle.envs.datasets import LETTERS, SOURCES
from mettle.errors import UserError

HAS_DATASETS = importlib.util.find_spec("datasets") is not None
needs_datasets = pytest.mark.skipif(not HAS_DATASETS, reason="needs mettle-lab[data]")
CHOICES = ("gpqa_diamond", "gpqa_main", "mmlu", "mmlu_pro", "openbookqa")


@pytest.fixture
def no_library(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        module.importlib.util, "find_spec", lambda name: None if name == "datasets" else find_spec(name)
    )


@pytest.mark.parametrize("name", SOURCES)
def test_a_stand_in_has_the_form_of_its_dataset_and_says_that_it_is_none(name, no_library, caplog):
    rows = vf.load_example_dataset(name, offline=True)
    assert len(rows) == 200
    assert len({row["question"] for row in rows}) == 200
    assert {row["source"] for row in rows} == {f"offline stand-in, not {name}"}
    assert f"offline stand-in for {name}, made by Mettle and not from that dataset" in caplog.text
    again = vf.load_example_dataset(name, offline=True)
    assert list(again) == list(rows)
    assert list(vf.load_example_dataset(name, "another", offline=True)) != list(rows)
    if name in CHOICES:
        for row in rows:
            listed = re.findall(r"^([A-J])[:.] (.+)$", row["question"], re.M)
            assert row["answer"] in [letter for letter, _ in listed]
            assert len({text for _, text in listed}) == len(listed) == (10 if name == "mmlu_pro" else 4)


def test_answers_of_the_stand_ins_are_right(no_library):
    for row in vf.load_example_dataset("gsm8k", offline=True):
        found = re.match(r"\w+ has (\d+) boxes with (\d+) \w+ in each, and gives (\d+)", row["question"])
        if found:
            boxes, each, given = map(int, found.groups())
            assert row["answer"] == str(boxes * each - given)
    for row in vf.load_example_dataset("aime2024", offline=True):
        assert 0 <= int(row["answer"]) <= 999
    for row in vf.load_example_dataset("mmlu", offline=True):
        found = re.search(r"a mass of (\d+) kg at (\d+) m", row["question"])
        if found:
            force = int(found[1]) * int(found[2])
            assert f"{row['answer']}: {force}\n" in row["question"] + "\n"
    for row in vf.load_example_dataset("prime_code", offline=True):
        cases = json.loads(row["answer"])["test_cases"]
        assert len(cases) == 5
        found = re.search(r"numbers are greater than (\d+)", row["question"])
        if found:
            for case in cases:
                values = [int(value) for value in case["input"].splitlines()[1].split()]
                assert int(case["output"]) == sum(value > int(found[1]) for value in values)


def test_n_rows_are_drawn_by_the_seed(no_library):
    ten = vf.load_example_dataset("gsm8k", n=10, seed=1, offline=True)
    assert len(ten) == 10
    assert list(ten) == list(vf.load_example_dataset("gsm8k", n=10, seed=1, offline=True))
    assert list(ten) != list(vf.load_example_dataset("gsm8k", n=10, seed=2, offline=True))
    assert len(vf.load_example_dataset("gsm8k", n=10_000, offline=True)) == 200


def test_an_unknown_name_names_the_known_ones():
    with pytest.raises(UserError, match=r"no example dataset 'gsm9k'; there are aime2024, .*gsm8k"):
        vf.load_example_dataset("gsm9k")


def test_without_the_library_the_stand_in_says_how_to_get_the_real_one(no_library, caplog):
    assert len(vf.load_example_dataset("gsm8k", n=3)) == 3
    assert "pip install 'mettle-lab[data]'" in caplog.text
    with pytest.raises(UserError, match=r"pip install 'mettle-lab\[data\]'"):
        vf.load_example_dataset("gsm8k", offline=False)


@needs_datasets
def test_without_a_network_it_tries_nothing_and_says_one_line(monkeypatch, caplog, tmp_path):
    import datasets

    monkeypatch.setattr(module, "_is_reachable", lambda endpoint: False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    tried = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: tried.append(address))
    rows = vf.load_example_dataset("gsm8k", n=3)
    with pytest.raises(UserError) as caught:
        vf.load_example_dataset("gsm8k", offline=False)
    assert tried == []
    assert set(rows.column_names) == {"question", "answer", "source"}
    assert "Not gsm8k" in vf.load_example_dataset("gsm8k").info.description
    assert "offline=True gives a stand-in" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not datasets.config.HF_HUB_OFFLINE


RAW = {
    "aime2024": ({"problem": "P", "answer": "042", "id": 1}, ("P", "42")),
    "aime2025": ({"question": "Q", "answer": "7"}, ("Q", "7")),
    "amc2023": ({"problem": "P", "answer": "27.0"}, ("P", "27.0")),
    "gsm8k": ({"question": "Q", "answer": "so it is\n#### 1,250"}, ("Q", "1,250")),
    "math": ({"problem": "P", "solution": r"so \boxed{\frac{1}{2}}", "level": "1"}, ("P", r"\frac{1}{2}")),
    "math500": ({"problem": "P", "answer": "3", "solution": "s"}, ("P", "3")),
    "mmlu": (
        {"question": "Q", "choices": ["a", "b", "c", "d"], "answer": 2, "subject": "s"},
        ("Question: Q\n\nA: a\nB: b\nC: c\nD: d", "C"),
    ),
    "mmlu_pro": ({"question": "Q", "options": ["a", "b"], "answer": "B"}, ("Question: Q\n\nA: a\nB: b", "B")),
    "openbookqa": (
        {"question_stem": "Q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"},
        ("Question: Q\n\nChoices:\nA. a\nB. b", "B"),
    ),
    "openrs_easy": ({"problem": "P", "answer": "3", "level": "Easy"}, ("P", "3")),
    "prime_code": ({"prompt": "In Python: P", "verification_info": "{}"}, ("In Python: P", "{}")),
}


@needs_datasets
@pytest.mark.parametrize("name", RAW)
def test_rows_of_the_real_dataset_become_question_and_answer(name, monkeypatch):
    import datasets

    row, expected = RAW[name]
    asked = []

    def load_dataset(path, config, split):
        asked.append((path, config, split))
        unwanted = {**row, "level": "Hard"} if name == "openrs_easy" else row
        return datasets.Dataset.from_list([row, unwanted])

    monkeypatch.setattr(module, "_is_reachable", lambda endpoint: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = vf.load_example_dataset(name, offline=False)
    assert set(rows.column_names) == {"question", "answer"}
    assert (rows[0]["question"], rows[0]["answer"]) == expected
    assert len(rows) == {"openrs_easy": 1, "aime2025": 4}.get(name, 2)
    assert {path for path, _, _ in asked} == {SOURCES[name].path}
    assert {split for _, _, split in asked} == {SOURCES[name].split}


def test_options_that_come_right_first_are_put_in_another_order():
    row = {"Question": "Q", "Correct Answer": "right", **{f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)}}
    read = [SOURCES["gpqa_main"].read(row, index) for index in range(40)]
    for question, answer in read:
        assert f"{answer}: right" in question
        assert all(f": wrong {i}" in question for i in (1, 2, 3))
    assert {answer for _, answer in read} == set(LETTERS[:4])
    assert read == [SOURCES["gpqa_main"].read(row, index) for index in range(40)]


@needs_datasets
def test_an_environment_takes_an_example_dataset_as_it_is():
    env = vf.SingleTurnEnv(dataset=lambda: vf.load_example_dataset("gsm8k", n=4, offline=True), rubric=vf.MathRubric())
    row = env.get_dataset()[0]
    assert row["prompt"][-1]["content"] == row["question"]
