"""`mettle hub serve`: serves the runs of a folder, refuses what it cannot serve."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from mettle.runs.ports import free_port

pytest.importorskip("fastapi")
pytestmark = pytest.mark.usefixtures("forked_commands")


@pytest.fixture
def port():
    return free_port()


@pytest.mark.e2e
def test_the_runs_of_a_folder_are_served_until_ctrl_c(run_dir, port, tmp_path):
    own = ["--data", str(tmp_path / "hub")]
    process = subprocess.Popen(
        [sys.executable, "-m", "mettle.cli", "hub", "serve", "--runs", str(run_dir.parent), "--port", str(port), *own],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        page = _page(f"http://127.0.0.1:{port}/")
        assert "words" in page
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=100)
    assert process.returncode in (0, 130), err
    assert "Traceback" not in err


def test_a_folder_that_is_not_there_is_refused(mettle):
    ended = mettle("hub", "serve", "--runs", "nowhere")
    assert (ended.code, ended.err) == (
        2, "error: no folder of runs at nowhere; `mettle quickstart` makes a first run\n",
    )  # fmt: skip


def test_a_port_in_use_is_refused(run_dir, port, tmp_path):
    own = ["--data", str(tmp_path / "hub")]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        done = subprocess.run(
            [sys.executable, "-m", "mettle.cli", "hub", "serve", "--runs", str(run_dir.parent), "--port", str(port), *own],
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
    assert done.returncode == 2
    assert f"error: port {port} on 127.0.0.1 is in use" in done.stderr.splitlines()[-1]


def test_the_shipped_endpoints_can_be_read():
    from pathlib import Path

    from mettle.clients.endpoints import read_registry

    endpoints = read_registry(Path(__file__).parents[2] / "configs" / "endpoints.toml").endpoints
    assert json.dumps(sorted(endpoints)) == '["local"]'


def _page(url: str) -> str:
    deadline = time.monotonic() + 100
    while True:
        try:
            with urlopen(url, timeout=60) as answer:
                return str(answer.read().decode())
        except URLError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
