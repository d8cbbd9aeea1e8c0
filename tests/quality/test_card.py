"""The quality card: what is on it, when it passes, and how it is written."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from mettle.envs.packages.loading import resolve_environment
from mettle.envs.packages.scaffold import create_environment
from mettle.errors import UserError
from mettle.quality.card import make_card
from mettle.quality.markdown import card_markdown, rules_markdown
from mettle.quality.rewards import reward_test

from .test_evaluations import GOOD, save

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(path.parent.name for path in (ROOT / "environments").glob("*/pyproject.toml"))
STARTS_MACHINES = {"agent_task", "shell_task"}
"""A rollout starts an agent in one machine and is judged in another."""
RUNS_CODE = STARTS_MACHINES | {"code_judge"}
"""Their cards take the longest."""


@pytest.fixture
def package(here):
    return create_environment("made-card", here / "environments")


def statuses(card, section):
    return {check.name: check.status for check in card.sections[section]}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow, pytest.mark.nightly]) if n in RUNS_CODE else n for n in SHIPPED],
)
def test_shipped_environments_pass(name, here, monkeypatch):
    """A copy: the card of the checkout's own would tell of the evaluations that somebody has run there."""
    copy = here / "environments" / name
    shutil.copytree(ROOT / "environments" / name, copy, ignore=shutil.ignore_patterns("outputs"))
    entry = resolve_environment(name.replace("_", "-"))
    assert entry.folder == copy
    if name in STARTS_MACHINES:  # no chance is in them, so fewer rows say the same; their cards were made with all
        monkeypatch.setattr(reward_test, "GAME_FACTOR", 1)
    card = make_card(entry.name, is_testing=False)
    assert [f"{c.name}: {c.detail}" for c in card.checks if c.status not in ("pass", "skip")] == []
    assert [f"{f.rule.id} {f.file}:{f.line} {f.what}" for f in card.lint.open_findings] == []
    assert list(card.sections) == ["package", "data", "reward", "lint", "baseline"]


def test_what_a_package_lacks_is_named(package):
    manifest = package / "pyproject.toml"
    manifest.write_text(
        manifest.read_text().replace('dependencies = ["mettle-lab"]\n', "").replace("description", "summary")
    )
    (package / "README.md").write_text("# made-card\n\nAsks for capitals.\n")
    (package / "tests" / "test_made_card.py").unlink()
    card = make_card("made-card")
    found = {check.name: check for check in card.sections["package"]}
    assert "description, a dependency on mettle or verifiers" in found["metadata"].detail
    assert "reward correct, reward num_characters, argument num_examples, how to run it" in found["readme"].detail
    assert (found["tests"].status, found["tests"].detail) == ("fail", "there are none")
    assert not card.has_passed


def test_the_packages_own_tests_are_run_and_a_failing_one_is_named(package):
    test = package / "tests" / "test_made_card.py"
    test.write_text(test.read_text() + "\n\ndef test_wrong():\n    assert 1 == 2\n")
    found = {check.name: check for check in make_card("made-card").sections["package"]}["tests"]
    assert found.status == "fail"
    assert "test_wrong" in found.detail


def test_tests_that_never_end_are_stopped(package):
    (package / "tests" / "test_made_card.py").write_text("import time\n\ndef test_slow():\n    time.sleep(60)\n")
    found = {check.name: check for check in make_card("made-card", test_timeout_s=2).sections["package"]}["tests"]
    assert (found.status, found.detail) == ("fail", "no end within 2 s")


def test_an_environment_that_does_not_load_has_a_card_that_says_so(package):
    module = package / "made_card.py"
    module.write_text(module.read_text().replace("    rows = ROWS", "    raise OSError('no data')\n    rows = ROWS"))
    card = make_card("made-card")
    assert statuses(card, "package") == {"loads": "fail"}
    assert "no data" in card.sections["package"][0].detail
    assert statuses(card, "lint") == {"lint": "pass"}
    assert not card.has_passed


def test_an_environment_whose_rows_cannot_be_read_has_a_card(package):
    module = package / "made_card.py"
    module.write_text(
        module.read_text().replace("dataset=rows[:-1]", "dataset=lambda: 1 / 0").replace("eval_dataset=rows[-1:], ", "")
    )
    card = make_card("made-card", is_testing=False)
    assert statuses(card, "data") == {"dataset": "fail"}
    assert statuses(card, "reward") == {"rows": "fail"}


def test_the_baseline_is_the_newest_evaluation(package):
    save(package / "outputs" / "evals" / "made-card--m" / "abcd", GOOD)
    found = statuses(make_card("made-card", is_testing=False), "baseline")
    assert found["baseline m: enough rollouts"] == "pass"
    assert set(found.values()) <= {"pass", "skip"}


def test_settings_of_the_package_are_obeyed(package):
    manifest = package / "pyproject.toml"
    module = package / "made_card.py"
    module.write_text(module.read_text().replace("weights=[1.0, 0.0]", "weights=[1.0, 0.0]").replace(
        "return float((parser", "return 3.0 * float((parser").replace("    return float(len", "    random.random()\n    return float(len")
    )  # fmt: skip
    module.write_text(module.read_text().replace("from typing import Any", "import random\nfrom typing import Any", 1))
    assert statuses(make_card("made-card", is_testing=False), "reward")["in range"] == "fail"
    text = manifest.read_text()
    manifest.write_text(
        text + '\n[tool.mettle.quality]\nreward_range = [0, 3]\nallow = {unseeded-random = "a metric"}\n'
    )
    card = make_card("made-card", is_testing=False)
    assert statuses(card, "reward")["in range"] == "pass"
    assert [(f.rule.id, f.allowed) for f in card.lint.findings] == [("unseeded-random", "a metric")]
    for wrong, message in (
        ("rows = 3", r"pyproject.toml:\d+: unknown key 'rows'; did you mean 'num_rows'"),
        ("reward_range = [3]", r"pyproject.toml:\d+: reward_range"),
        ("reward_range = [3, 3]", r"pyproject.toml:\d+: reward_range: must be \[low, high\]"),
        ('preset = "x"', "no preset 'x'"),
    ):
        manifest.write_text(f"{text}\n[tool.mettle.quality]\n{wrong}\n")
        with pytest.raises(UserError, match=message):
            make_card("made-card")


def test_a_leak_that_is_meant_is_excused_with_its_reason(package):
    module, manifest = package / "made_card.py", package / "pyproject.toml"
    module.write_text(module.read_text().replace("dataset=rows[:-1]", "dataset=rows"))
    assert statuses(make_card("made-card", is_testing=False), "data")["no leakage"] == "fail"
    manifest.write_text(manifest.read_text() + '\n[tool.mettle.quality.allow]\n"no leakage" = "there are few"\n')
    found = {c.name: c for c in make_card("made-card", is_testing=False).sections["data"]}["no leakage"]
    assert (found.status, found.detail.rpartition("; ")[2]) == ("skip", "allowed: there are few")


def test_the_markdown_is_the_same_when_nothing_changed(package):
    def without_times(page):  # how long an answer took is of the machine and of what else it does
        return re.sub(r"each within [\d.]+ s", "", page)

    first = card_markdown(make_card("made-card"))
    assert without_times(card_markdown(make_card("made-card"))) == without_times(first)
    assert "each within" in first
    assert first.startswith("# Quality of made-card 0.1.0\n\nResult: warn\n")
    assert "| gold above wrong | pass |" in first
    assert "| near-miss |" in first


def test_the_page_of_the_rules_has_each_rule():
    page = rules_markdown("<!-- note -->")
    assert page.startswith("<!-- note -->\n\n# Lint rules\n")
    assert "## gold-substring\n\nError, read off the source: " in page
