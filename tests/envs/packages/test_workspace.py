"""A workspace: its configs load, its environment is sound, its notes name only commands that exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import click
import pytest

from mettle.cli import main
from mettle.clients.endpoints import read_registry
from mettle.config.options import Given
from mettle.envs.packages.eval_defaults import package_defaults
from mettle.envs.packages.workspace import SKILL_FOLDERS, set_up
from mettle.errors import StorageError, UserError
from mettle.evals.plan import read_plan
from mettle.gepa.config import load_spec, read_file
from mettle.runs.launch import load_run_config


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new workspace, and we are in it."""
    set_up(tmp_path / "lab", agents=list(SKILL_FOLDERS))
    monkeypatch.chdir(tmp_path / "lab")
    return tmp_path / "lab"


def test_every_config_loads(lab):
    registry = read_registry(lab / "configs/endpoints.toml", is_needed=True)
    assert registry.endpoints["local"][0].url == "http://127.0.0.1:8000/v1"
    evals = sorted((lab / "configs/eval").glob("*.toml"))
    runs = sorted((lab / "configs/rl").glob("*.toml"))
    searches = sorted((lab / "configs/gepa").glob("*.toml"))
    assert evals
    assert runs
    assert searches
    for path in evals:
        for loaded in read_plan([path], Given(), package_defaults):
            assert loaded.config.env_id == "my-task"
            assert loaded.config.model in registry.endpoints
    for path in runs:
        config = load_run_config([path]).config
        assert config.orchestrator.envs[0].id == "my-task"
    for path in searches:
        spec = load_spec([read_file(path)]).config
        assert {spec.model, spec.reflection_model} <= set(registry.endpoints)


def test_the_environment_passes_its_reward_test(lab, capsys):
    assert main.run(["env", "test", "my-task"]) == 0, capsys.readouterr()


def _commands(text: str) -> list[list[str]]:
    """What is on a line of its own, or in code in a sentence."""
    lines = re.findall(r"^\s*(?:#\s*)?(mettle .*)$", text, re.MULTILINE) + re.findall(r"`(mettle [^`]+)`", text)
    return [shlex.split(re.split(r"  +|\s+#", line)[0])[1:] for line in lines]


def _complaint(words: list[str]) -> str:
    """Why these words are no command; nothing when they are one."""
    command: click.Command = main.cli
    context = click.Context(command, info_name="mettle")
    while isinstance(command, click.Group):
        if not words or words[0] in ("COMMAND", "--help"):
            return ""
        found = command.get_command(context, words[0])
        if found is None:
            return f"{command.name} has no {words[0]}"
        command, words = found, words[1:]
        context = click.Context(command, parent=context, info_name=command.name)
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
    flags = [word for word in words if word.startswith("-") and not word.startswith("--model")]
    unknown = [flag for flag in flags if flag not in known]
    return f"{command.name} has no {unknown}" if unknown else ""


def test_every_command_in_the_notes_exists_with_its_flags(lab):
    pages = [path for path in lab.rglob("*") if path.suffix in (".md", ".toml") and "my_task" not in path.parts]
    found = {str(page.relative_to(lab)): _commands(page.read_text()) for page in pages}
    assert sum(map(len, found.values())) > 60
    wrong = [(page, words, _complaint(words)) for page, lines in found.items() for words in lines if _complaint(words)]
    assert wrong == []
    nouns = {words[0] for lines in found.values() for words in lines}
    assert {"data", "env", "eval", "rl", "gepa", "doctor"} <= nouns


def test_links_in_the_notes_lead_to_files(lab):
    for target in re.findall(r"\]\(([^)]+)\)", (lab / "AGENTS.md").read_text()):
        assert (lab / target).is_file()


def test_skills_are_where_each_coding_agent_looks(lab):
    names = {path.stem for path in (lab / "skills").glob("*.md")}
    assert len(names) >= 7
    for folder in SKILL_FOLDERS.values():
        assert {path.parent.name for path in (lab / folder).glob("*/SKILL.md")} == names
    for name in names:
        text = (lab / "skills" / f"{name}.md").read_text()
        assert text.startswith(f"---\nname: {name}\ndescription: ")


def test_nothing_is_overwritten_and_what_was_left_is_said(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "AGENTS.md").write_text("mine")
    (tmp_path / ".gitignore").write_text("/runs/\n")
    (tmp_path / "configs" / "endpoints.toml").symlink_to(tmp_path / "nowhere")
    before = (tmp_path / "AGENTS.md").read_text()
    _, files = set_up(tmp_path)
    status = {file.path: (file.status, file.note) for file in files}
    assert status["AGENTS.md"] == ("kept", "")
    assert (tmp_path / "AGENTS.md").read_text() == before
    assert status[".gitignore"][0] == "kept"
    assert "/outputs/" in status[".gitignore"][1]
    assert "/runs/" not in status[".gitignore"][1]
    assert status["configs/endpoints.toml"][0] == "kept"
    assert not (tmp_path / "nowhere").exists()
    tree = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    _, again = set_up(tmp_path)
    assert {file.status for file in again} == {"same", "kept"}
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == tree


def test_the_configs_are_about_an_environment_that_is_there(tmp_path):
    (tmp_path / "environments" / "chess_puzzles").mkdir(parents=True)
    (tmp_path / "environments" / "chess_puzzles" / "pyproject.toml").write_text("[project]\nname='chess-puzzles'\n")
    name, _ = set_up(tmp_path)
    assert name == "chess-puzzles"
    assert 'env_id = "chess-puzzles"' in (tmp_path / "configs/eval/minimal.toml").read_text()


def test_mistakes_are_one_error(tmp_path):
    with pytest.raises(UserError, match="no coding agent 'clod' is known"):
        set_up(tmp_path, agents=["clod"])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; a workspace is a folder"):
        set_up(tmp_path / "file")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "configs").write_text("a file where a folder should be")
    with pytest.raises(StorageError, match="what is there is as it was"):
        set_up(tmp_path / "here")


def test_the_command_prints_json_and_the_next_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.run(["lab", "setup", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["environment"] == "my-task"
    assert {file["status"] for file in document["files"]} == {"written"}
    assert main.run(["lab", "setup"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("env check my-task")
