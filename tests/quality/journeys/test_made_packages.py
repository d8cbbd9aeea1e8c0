"""Packages that are made from templates and from data: each passes its own tests, its reward test and the lint."""

from __future__ import annotations

import json

import pytest

import mettle.envs as vf
from mettle.envs.packages.scaffold import TEMPLATES, create_environment
from mettle.errors import UserError
from mettle.quality.card import make_card
from mettle.quality.data.formats import FORMATS
from mettle.quality.data.package import create_from_data
from mettle.quality.data.report import inspect_data
from mettle.quality.data.sources import Dataset

from ..test_data import SAMPLES

READY = [name for name in TEMPLATES if name != "judge" or hasattr(vf, "JudgeRubric")]


def problems(card) -> list[str]:
    return [f"{check.name}: {check.detail}" for check in card.checks if check.status not in ("pass", "skip")]


@pytest.mark.parametrize("template", READY)
def test_a_template_passes_everything_but_the_size_of_its_data(here, template):
    name = f"made-{template}"
    folder = create_environment(name, here / "environments", template)
    card = make_card(name)
    assert card.has_passed
    assert [problem for problem in problems(card) if not problem.startswith("enough rows")] == []
    assert {check.name: check.status for check in card.sections["package"]}["tests"] == "pass"
    assert folder == here / "environments" / name.replace("-", "_")


@pytest.mark.parametrize("name", FORMATS)
def test_an_environment_made_of_data_passes_everything(here, name):
    report = inspect_data(Dataset("rows.jsonl", "file", {"train": SAMPLES[name]}))
    made = create_from_data(f"of-{name}", here / "environments", report)
    card = make_card(f"of-{name}", is_testing=name in ("gsm8k", "code"))  # the tests are the same text for each
    assert card.has_passed
    assert problems(card) == []
    assert card.rewards[0].num_rows == 8
    splits = [json.loads(line)["split"] for line in (made.folder / f"of_{name.replace('-', '_')}_data.jsonl").open()]
    assert set(splits) == {"train", "eval"}


def test_choices_are_shown_with_letters_and_the_answer_is_the_letter(here):
    report = inspect_data(Dataset("rows.jsonl", "file", {"train": SAMPLES["multiple-choice"]}))
    create_from_data("letters", here / "environments", report)
    rows = vf.load_environment("letters").get_dataset()
    row = next(row for row in rows if row["question"].startswith("q4\n"))
    assert row["question"] == "q4\nA. x\nB. y\nC. z4"
    assert row["answer"] == "B"


def test_nothing_is_written_over_and_nothing_half(here):
    create_environment("once", here)
    before = (here / "once" / "once.py").read_text()
    with pytest.raises(UserError, match="exists already"):
        create_environment("once", here, "tool")
    assert (here / "once" / "once.py").read_text() == before
    empty = inspect_data(Dataset("rows.jsonl", "file", {"train": [{"note": "x"}]}))
    with pytest.raises(UserError, match=r"no column that looks like an answer; .* \(there are note\)"):
        create_from_data("nothing", here, empty)
    tests = [{"text": "q", "code": "x", "tests": ["check(candidate)"]}] * 3
    with pytest.raises(UserError, match="no row can be used: 3 rows: its tests are neither"):
        create_from_data("nothing", here, inspect_data(Dataset("rows.jsonl", "file", {"train": tests})))
    assert not (here / "nothing").exists()


@pytest.mark.parametrize("name", ["2words", "class", "a b", ""])
def test_names_that_cannot_be_a_packages_are_refused(here, name):
    with pytest.raises(UserError, match="cannot be an environment's name"):
        create_environment(name, here)
