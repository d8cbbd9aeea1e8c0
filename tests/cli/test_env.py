"""`mettle env`: list, describe, make; refuse what is no environment."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from mettle.envs.packages.install import pip_error


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "environments" / "two_words"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "two-words"\nversion = "0.2.0"\ndescription = "Says two words."\n'
    )
    (folder / "two_words.py").write_text(
        "import mettle.envs as vf\n\n\ndef polite(completion):\n    return 1.0\n\n\n"
        "def load_environment(num: int = 2):\n"
        "    rows = [{'question': 'hi', 'answer': 'ho'}] * num\n"
        "    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[polite], weights=[0.5]))\n"
    )
    return folder


def test_environments_here_are_listed(mettle, package):
    ended = mettle("env", "list")
    assert ended.code == 0
    assert re.search(r"^two-words +0\.2\.0 +environments/two_words +Says two words\.$", ended.out, re.MULTILINE)
    assert "two-words" in [entry["name"] for entry in mettle("env", "list", "--json").json]


def test_an_environment_is_described(mettle, package):
    found = mettle("env", "info", "two-words", "--json").json
    assert (found["kind"], found["train_tasks"], found["eval_tasks"]) == ("SingleTurnEnv", 2, None)
    assert found["arguments"] == {"num": 2}
    assert found["rewards"]["polite"] == 0.5
    assert re.search(r"^train tasks +2$", mettle("env", "info", "two_words").out, re.MULTILINE)


def test_an_environment_that_does_not_load_is_described_with_its_problem(mettle, package):
    (package / "two_words.py").write_text("def load_environment():\n    raise OSError('no data')\n")
    found = mettle("env", "info", "two-words", "--json").json
    assert "no data" in found["problem"]
    assert found["version"] == "0.2.0"


def test_an_unknown_environment_names_the_nearest(mettle, package):
    ended = mettle("env", "info", "two-wrds")
    assert ended.code == 2
    assert "did you mean 'two-words'?" in ended.err


def test_a_new_environment_works_at_once(mettle, tmp_path):
    made = mettle("env", "init", "my-words")
    assert made.code == 0, made.err
    assert made.out.endswith("next: mettle env test my-words\n")
    found = mettle("env", "info", "my-words", "--json").json
    assert found["train_tasks"] > 0
    again = mettle("env", "init", "my-words")
    assert again.code == 2
    assert again.err.count("\n") == 1


def test_install_refuses_a_folder_that_is_no_package(mettle, tmp_path):
    (tmp_path / "empty").mkdir()
    ended = mettle("env", "install", "./empty")
    assert (ended.code, ended.err) == (2, "error: no environment package in ./empty: it has no pyproject.toml\n")


def test_install_calls_pip_on_the_folder_and_tells_its_error(mettle, package, monkeypatch):
    calls = []

    def pip(command, **_):
        calls.append(command)
        is_first = len(calls) == 1
        return subprocess.CompletedProcess(
            command, 0 if is_first else 1, "", "" if is_first else "x\nERROR: no wheel\n"
        )

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: name)
    ended = mettle("env", "install", "two-words")
    assert (ended.code, ended.out.splitlines()[-1]) == (0, "next: mettle env info two-words")
    assert calls[0][:4] == [sys.executable, "-m", "pip", "install"]
    assert calls[0][-2:] == ["-e", str(package)]
    failed = mettle("env", "install", "two-words", "--no-editable")
    assert failed.code == 3
    assert failed.err.endswith(": no wheel\n")
    assert calls[1][-1] == str(package)
    assert "-e" not in calls[1]


def test_install_leaves_pip_alone_where_mettle_is_not_installed(mettle, package, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", missing)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip would fetch a stranger's `mettle`"))
    ended = mettle("env", "install", "two-words")
    assert ended.code == 2
    assert "`make install` first" in ended.err


def test_the_line_that_says_what_is_wrong_is_taken_from_what_pip_prints():
    said = (
        "WARNING: old\n  error: subprocess-exited-with-error\n      ModuleNotFoundError: No module named 'hatchling'\n"
    )
    said += "  note: This error originates from a subprocess, and is likely not a problem with pip.\n"
    assert pip_error(said) == "ModuleNotFoundError: No module named 'hatchling'"
    assert pip_error("ERROR: No matching distribution found for words\n") == "No matching distribution found for words"
