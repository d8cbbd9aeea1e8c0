"""Packages that are made from templates and from data: each passes its own tests, its reward test and the lint."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import mettle.envs as vf
from mettle.cli.main import cli
from mettle.envs.packages.scaffold import TEMPLATES, create_environment
from mettle.errors import UserError
from mettle.quality.card import make_card
from mettle.quality.data.formats import FORMATS
from mettle.quality.data.package import create_from_data
from mettle.quality.data.report import inspect_data
from mettle.quality.data.sources import Dataset
from mettle.quality.rewards.near_misses import near_misses
from mettle.records.messages import Response, ResponseMessage

from ..test_data import SAMPLES


@pytest.fixture
def mettle():
    """Run a command; what it printed."""

    def run(*words):
        result = CliRunner().invoke(cli, list(words))
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    return run


READY = [name for name in TEMPLATES if name != "judge" or hasattr(vf, "JudgeRubric")]
BY_DAY = {"single-turn", "tool", "gsm8k", "multiple-choice", "date", "json"}
"""A card costs a second or two; what each format's recipe pays is in `test_data.py` and `rewards`, for all of them."""


def by_day(names):
    return [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in names]


def problems(card) -> list[str]:
    sizes = ("enough rows", "enough held out")
    return [f"{c.name}: {c.detail}" for c in card.checks if c.status not in ("pass", "skip") and c.name not in sizes]


@pytest.mark.parametrize("template", by_day(READY))
def test_a_template_passes_everything_but_the_size_of_its_data(here, template):
    name = f"made-{template}"
    folder = create_environment(name, here / "environments", template)
    card = make_card(name)
    assert card.has_passed
    assert problems(card) == []
    assert {check.name: check.status for check in card.sections["package"]}["tests"] == "pass"
    assert folder == here / "environments" / name.replace("-", "_")


@pytest.mark.parametrize("name", by_day(FORMATS))
def test_an_environment_made_of_data_passes_everything(here, name):
    report = inspect_data(Dataset("rows.jsonl", "file", {"train": SAMPLES[name]}))
    made = create_from_data(f"of-{name}", here / "environments", report)
    card = make_card(f"of-{name}", is_testing=name in ("gsm8k", "code"))  # the tests are the same text for each
    assert card.has_passed
    assert problems(card) == []
    assert card.rewards[0].num_rows == 8
    splits = [json.loads(line)["split"] for line in (made.folder / f"of_{name.replace('-', '_')}_data.jsonl").open()]
    assert set(splits) == {"train", "eval"}


async def test_a_model_that_is_always_a_day_off_passes_nothing(here):
    rows = [{"question": f"When was treaty {n} signed?", "answer": f"2021-03-{n % 28 + 1:02d}"} for n in range(60)]
    made = create_from_data(
        "treaties", here / "environments", inspect_data(Dataset("rows.jsonl", "file", {"train": rows}))
    )
    assert made.recipe.format == "date"

    class DayOff(vf.Client):
        async def get_response(self, prompt, *args, **kwargs):
            asked = next(row for row in rows if row["question"] == prompt[-1]["content"])
            said = near_misses(asked["answer"])["other-day"]
            message = ResponseMessage(content=f"<answer>{said}</answer>", finish_reason="stop", is_truncated=False)
            return Response(id="x", created=0, model="m", usage=None, message=message)

    results = await vf.load_environment("treaties").evaluate(client=DayOff(), model="m", rollouts_per_example=2)
    assert results.stats.pass_at_k["1"].mean == 0.0
    assert results["metadata"]["avg_reward"] == pytest.approx(0.1), "the form is paid, and it does not pass"


def test_a_dataset_that_leaves_few_rows_to_measure_on_says_so(here, mettle):
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(60)]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    looked = mettle("data", "inspect", "rows.jsonl")
    assert "a tenth of 60 rows would be 6: a rate measured on 6 tasks is known to about +-40 points" in looked
    made = mettle("env", "init", "few", "--from", "data", "rows.jsonl")
    assert "few evaluation rows: " in made
    assert "have at least 20 evaluation rows, better 100" in made
    card = make_card("few", is_testing=False)
    found = next(check for check in card.checks if check.name == "enough held out")
    assert found.status == "warn"
    assert "rows are held out: a rate measured on" in found.detail


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
