"""`mettle data inspect`, `env init --from data`, `env test`, `env check`, `eval check`: what is printed, and exit codes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _forget_modules(monkeypatch):
    """What is imported from a test's folder is forgotten after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("sums", "broken")):
            del sys.modules[name]


@pytest.fixture
def sums(tmp_path) -> Path:
    rows = [{"question": f"{n} + {n}?", "answer": f"twice {n}\n#### {2 * n}"} for n in range(40)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_from_a_file_to_a_checked_environment(mettle, sums):
    seen = mettle("data", "inspect", "sums.jsonl")
    assert seen.code == 0, seen.err
    assert (
        "answers: gsm8k, confidence 92% (measured on labelled columns): 40 of 40 answers end in `#### ` and a result"
        in seen.out
    )
    assert seen.out.endswith("next: mettle env init my-task --from data sums.jsonl\n")
    made = mettle("env", "init", "sums-task", "--from", "data", "sums.jsonl")
    assert made.code == 0, made.err
    assert made.out.endswith("next: mettle env test sums-task\n")
    tested = mettle("env", "test", "sums-task")
    assert tested.code == 0, tested.out
    assert tested.out.endswith("next: mettle env check sums-task\n")
    checked = mettle("env", "check", "sums-task", "--no-tests", "--write")
    assert checked.code == 0, checked.out
    assert (sums.parent / "environments" / "sums_task" / "QUALITY.md").read_text().startswith("# Quality of sums-task")
    again = mettle("env", "init", "sums-task", "--from", "data", "sums.jsonl")
    assert (again.code, again.err.count("\n")) == (2, 1)


def test_json_of_each_reading_command(mettle, sums):
    found = mettle("data", "inspect", "sums.jsonl", "-n", 1, "--json").json
    assert (found["format"]["name"], len(found["rows"]), found["splits"]) == ("gsm8k", 1, {"train": 40})
    shipped = Path(__file__).resolve().parents[3] / "environments" / "arithmetic"
    ignored = shutil.ignore_patterns("outputs")  # a card tells of the evaluations that it finds beside
    shutil.copytree(shipped, sums.parent / "environments" / "arithmetic", ignore=ignored)
    report = mettle("env", "test", "arithmetic", "--json").json
    assert (report["status"], report["kinds"][0]["kind"]) == ("pass", "gold")
    card = mettle("env", "check", "arithmetic", "--no-tests", "--json").json
    assert (card["has_passed"], card["lint"]["findings"]) == (True, [])


def test_a_broken_environment_is_told_by_rule_with_where_why_and_fix(mettle, tmp_path):
    assert mettle("env", "init", "broken-task").code == 0
    module = tmp_path / "environments" / "broken_task" / "broken_task.py"
    text = module.read_text()
    whole = 'return float((parser.parse_answer(completion) or "").strip().lower() == answer.lower())'
    assert whole in text
    module.write_text(text.replace(whole, "return float(answer in parser.parse_answer(completion))"))
    line = module.read_text()[: module.read_text().index("return float(answer in")].count("\n") + 1
    ended = mettle("env", "check", "broken-task", "--no-tests")
    assert ended.code == 1
    assert f"  broken_task.py:{line}: gold-substring (error): " in ended.out
    assert "    why: " in ended.out
    assert "    fix: " in ended.out
    card = mettle("env", "check", "broken-task", "--no-tests", "--json")
    assert card.code == 1
    assert "gold-substring" in {finding["id"] for finding in card.json["lint"]["findings"]}


def test_custom_tests_decide_the_exit_code(mettle, tmp_path):
    tests = tmp_path / "tests.json"
    tests.write_text('[{"example_id": 0, "completion": "no number", "max": 0.0}]')
    assert mettle("env", "test", "arithmetic", "--custom", tests).code == 0
    tests.write_text('[{"example_id": 0, "completion": "no number", "min": 0.5, "name": "odd"}]')
    ended = mettle("env", "test", "arithmetic", "--custom", tests)
    assert ended.code == 1
    assert "custom: odd" in ended.out


def test_an_evaluation_is_checked_and_advised_on(mettle, tmp_path):
    folder = tmp_path / "outputs" / "evals" / "words--m" / "abcd"
    folder.mkdir(parents=True)
    rows = [{"example_id": n // 4, "reward": 0.0, "metrics": {}, "error": None} for n in range(40)]
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "metadata.json").write_text('{"env_id": "words", "model": "m"}')
    ended = mettle("eval", "check", "words")
    assert ended.code == 1
    assert "too hard for this model" in ended.out
    found = mettle("eval", "check", folder, "--json").json
    assert {check["name"]: check["status"] for check in found["checks"]}["mean above 0.05"] == "fail"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("data", "inspect", "none.jsonl"), "there is no file none.jsonl"),
        (("data", "inspect", "env:nothing-like-it"), "no environment 'nothing-like-it'"),
        (("env", "test", "arithmetic", "--preset", "x"), "there is no preset 'x'"),
        (("env", "test", "arithmetic", "--custom", "none.json"), "none.json cannot be read"),
        (("env", "test", "arithmetic", "-a", "{"), "is not JSON"),
        (("env", "check", "nothing-like-it"), "no environment 'nothing-like-it'"),
        (("env", "init", "x-task", "--from", "table", "f"), "--from takes the word data"),
        (
            ("env", "init", "x-task", "--from", "data", "f.jsonl", "--template", "tool"),
            "leave out --template or --from",
        ),
        (("eval", "check", "nothing-like-it"), "is no saved evaluation"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(mettle, words, message):
    ended = mettle(*words)
    assert ended.code == 2
    assert message in ended.err
    assert ended.err.count("\n") == 1
