"""A warm-up on chats from a file: they become part of the run, and a file that is not there is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mettle.config import load_config
from mettle.errors import UserError
from mettle.runs.config import RunConfig
from mettle.runs.create import create_run
from mettle.runs.stored import read_run_config

TOML = '[warm_up]\nenabled = true\ndemonstrations = "chats.jsonl"\n[[orchestrator.envs]]\nid = "reverse-text"\n'


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config in an empty folder that names `chats.jsonl` there."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    return path


def test_the_run_keeps_the_chats_and_needs_the_file_no_more(config, tmp_path):
    line = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n"
    (tmp_path / "chats.jsonl").write_text(line)
    run_dir = create_run(load_config(RunConfig, [config]), tmp_path / "run")
    (tmp_path / "chats.jsonl").unlink()
    assert (run_dir.path / "sft" / "demonstrations.jsonl").read_text() == line
    assert read_run_config(run_dir).warm_up.demonstrations == Path("chats.jsonl")


def test_a_file_that_is_not_there_is_said_before_anything_is_made(config, tmp_path):
    with pytest.raises(UserError, match=r"warm_up.demonstrations 'chats.jsonl': No such file.*`mettle data generate`"):
        create_run(load_config(RunConfig, [config]), tmp_path / "run")
    assert not (tmp_path / "run").exists()
