"""What holds for every command: an option means one thing, an example can be typed, a wrong path is a person's error."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import click
import pytest

from mettle.cli.main import cli

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENTS = {path.parent.name.replace("_", "-") for path in ROOT.glob("environments/*/pyproject.toml")}
MEANINGS = {
    "-p": {"provider"},
    "-b": {"api_base_url", "base_url"},
    "--dir": {"directory"},
    "-m": {"model"},
    "-k": {"api_key_var"},
    "-r": {"rollouts_per_example", "rollouts"},
}
"""The parameters that an option may set: one thing under the name that its command has for it."""


def commands(group: click.Group, path: str = "mettle"):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        elif command is not None:
            yield f"{path} {name}", command


def options():
    found = defaultdict(lambda: defaultdict(list))
    for path, command in commands(cli):
        for parameter in command.get_params(click.Context(command)):
            for name in getattr(parameter, "opts", ()):
                found[name][str(parameter.name).removeprefix("field__")].append(path)
    return found


def test_an_option_means_one_thing_wherever_it_is_taken():
    found = options()
    assert len(found) > 100
    for name, meant in MEANINGS.items():
        assert set(found[name]) <= meant, dict(found[name])
    assert all(meant.startswith("num") for meant in found["-n"]), "-n is how many"
    assert set(found["-n"]) >= {"num_examples", "num_tasks", "num_train", "num_rows"}
    assert {path.rpartition(" ")[0] for path in found["--dir"]["directory"]} <= {
        "mettle",
        "mettle rl",
        "mettle adapter",
        "mettle hub",
    }


def test_examples_name_environments_that_exist():
    texts = [command.help or "" for _, command in commands(cli)]
    texts += [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*/*.md")]
    said = {
        word
        for text in texts
        for word in re.findall(r"mettle (?:eval run|data generate|gepa run) ([a-z][a-z0-9-]+)(?= -m)", text)
    }
    assert "reverse-text" in said
    assert said - ENVIRONMENTS <= {"my-task", "my-environment", "my-env", "sums", "word-length"}, said - ENVIRONMENTS
    paths = {word for text in texts for word in re.findall(r"outputs/(?:evals|gepa)/([a-z0-9-]+?)--", text)}
    assert paths <= ENVIRONMENTS | {"my-task", "sums", "word-length"}, paths


@pytest.mark.parametrize(
    "words",
    [
        ("quickstart", "--no-browser", "--dir", "FILE"),
        ("rl", "run", str(ROOT / "configs" / "reverse-text.toml"), "--dir", "FILE"),
        ("eval", "run", "reverse-text", "-m", "m", "-b", "http://127.0.0.1:9/v1", "-o", "FILE"),
        ("data", "generate", "reverse-text", "-m", "m", "-b", "http://127.0.0.1:9/v1", "-o", "FILE"),
        ("gepa", "run", "reverse-text", "-m", "m", "-b", "http://127.0.0.1:9/v1", "-o", "FILE"),
        ("env", "init", "my-task", "--path", "FILE"),
        ("lab", "setup", "FILE"),
        ("hub", "serve", "--runs", "FILE"),
        ("eval", "list", "FILE"),
        ("eval", "view", "FILE"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_file_in_the_place_of_a_folder_is_a_persons_error(mettle, tmp_path, words):
    (tmp_path / "FILE").write_text("not a folder")
    ended = mettle(*words)
    assert ended.code == 2, ended.err
    assert ended.err.startswith("error: "), ended.err
    assert "FILE" in ended.err
    assert "a mistake in Mettle" not in ended.err
    assert (tmp_path / "FILE").read_text() == "not a folder"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this host has no /dev/full")
@pytest.mark.parametrize("words", [("env", "list"), ("eval", "list", "--json"), ("--help",), ("doctor", "--json")])
def test_an_output_that_is_full_is_a_persons_error(tmp_path, words):
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "mettle.cli", *words], stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
    assert (ended.returncode, ended.stderr) == (2, "error: cannot write the output: No space left on device\n")
