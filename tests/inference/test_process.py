"""The command: its ready file, its exit statuses, its death."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.inference.started import started

from mettle.errors import UserError
from mettle.inference.process import main, read_config
from mettle.runs.ports import free_port


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """The command sets up logging for its process; here that is the tests' own."""
    logger = logging.getLogger("mettle")
    handlers, propagate, level = list(logger.handlers), logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


pytestmark = pytest.mark.usefixtures("forked")


def call(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def failing(capsys: pytest.CaptureFixture[str], path: Path) -> str:
    """The one line that the command leaves with status 2."""
    assert main(["--config", str(path)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.e2e
def test_it_serves_until_sigterm_and_leaves_with_0(policy_folder: Path, tmp_path: Path) -> None:
    with started(tmp_path, model=policy_folder) as (process, ready):
        assert ready["pid"] == process.pid
        assert ready["base_url"] == f"http://127.0.0.1:{ready['port']}/v1"
        assert call(f"{ready['base_url']}/generate", {"prompt_ids": [1], "max_tokens": 2})["prompt_tokens"] == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=100) == 0
        assert not (tmp_path / "endpoints" / "inference.json").exists()


@pytest.mark.e2e
def test_after_a_kill_it_starts_again_on_the_same_port(policy_folder: Path, tmp_path: Path) -> None:
    with started(tmp_path, model=policy_folder, port=free_port()) as (process, ready):
        process.kill()
        process.wait()
    os.unlink(tmp_path / "endpoints" / "inference.json")
    with started(tmp_path, model=policy_folder, port=ready["port"], version=7) as (_, again):
        assert again["port"] == ready["port"]
        answer = call(f"{again['base_url']}/generate", {"prompt_ids": [1], "max_tokens": 2, "ignore_eos": True})
        assert answer["choices"][0]["versions"] == [7, 7]


def test_a_port_in_use_is_told_in_one_line(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = tmp_path / "inference.json"
        config.write_text(json.dumps({"model": str(policy_folder), "port": port}))
        assert f"port {port} on 127.0.0.1 is in use" in failing(capsys, config)


def test_a_missing_model_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "inference.json"
    config.write_text(json.dumps({"model": str(tmp_path / "nowhere")}))
    assert "nowhere" in failing(capsys, config)
    assert "no_config.json" in failing(capsys, tmp_path / "no_config.json")


def test_a_model_that_is_not_served_is_told_in_one_line(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((policy_folder / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "num_hidden_layers": 1}))
    config = tmp_path / "inference.json"
    config.write_text(json.dumps({"model": str(tmp_path)}))
    assert "mamba" in failing(capsys, config)


def test_a_config_that_is_wrong_names_the_field(tmp_path: Path) -> None:
    path = tmp_path / "inference.json"
    path.write_text(json.dumps({"model": "x", "max_slot": 3}))
    with pytest.raises(UserError, match="max_slot"):
        read_config(path)


def test_the_serving_process_does_without_transformers() -> None:
    code = "import sys, mettle.inference.process, mettle.inference.engine.embedded; assert 'torch' in sys.modules;"
    subprocess.run([sys.executable, "-c", code + "assert 'transformers' not in sys.modules"], check=True)


def test_config_server_and_mock_load_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, mettle.inference.config, mettle.inference.server, mettle.inference.process;"
        "import mettle.inference.engine.mock; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
