"""The Hub as a process: ready file, answers, bad input, an end on a signal."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mettle.errors import UserError
from mettle.hub.config import HubConfig
from mettle.hub.server import serve_hub

SOURCE = Path(__file__).parents[2] / "src"
pytestmark = pytest.mark.usefixtures("forked_commands")


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mettle.hub", *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def hub(runs, tmp_path_factory) -> Iterator[dict]:
    """A Hub over the test runs, as a process; its ready file."""
    ready = tmp_path_factory.mktemp("hub") / "hub.json"
    process = start("--runs", str(runs), "--port", "0", "--ready-file", str(ready))
    deadline = time.monotonic() + 100
    while not ready.exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield json.loads(ready.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) in (0, -signal.SIGTERM)
    process.stderr.close()


def test_the_ready_file_names_an_address_that_answers(hub):
    with urllib.request.urlopen(hub["base_url"] + "/health", timeout=60) as answer:
        assert json.load(answer)["status"] == "ok"
        assert "server" not in answer.headers
    assert hub["host"] == "127.0.0.1"
    assert hub["port"] > 0


def test_it_listens_on_loopback_only(hub):
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        probe.connect(("10.255.255.255", 1))
        address = probe.getsockname()[0]
    except OSError:
        pytest.skip("this machine has no other address")
    finally:
        probe.close()
    if address.startswith("127."):
        pytest.skip("this machine has no other address")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((address, hub["port"]), timeout=2).close()


def test_a_port_in_use_is_one_line_and_exit_code_2(runs):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start("--runs", str(runs), "--port", str(port))
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 2
    assert errors == f"error: port {port} on 127.0.0.1 is in use; give another with --port, or 0 for any free one\n"


def test_a_missing_folder_is_one_line_and_exit_code_2(tmp_path):
    process = start("--runs", str(tmp_path / "nowhere"), "--port", "0")
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2
    assert (
        errors
        == f"error: no folder {tmp_path / 'nowhere'}, and no evaluations: name a folder of runs, or one run directory\n"
    )


def test_garbage_is_looked_for_again_once_a_hub_answers(tmp_path):
    seen = []

    def ready(url, link):
        seen.append(gc.isenabled())
        os.kill(os.getpid(), signal.SIGTERM)

    config = HubConfig(
        data=tmp_path / "hub",
        runs=tmp_path,
        port=0,
        sandboxes=False,
        check_pushes=False,
        work_here=False,
        served_models=0,
    )
    gc.disable()  # as `mettle hub serve` does for its start
    try:
        serve_hub(config, ready)
    finally:
        gc.enable()
    assert seen == [True]


def test_a_model_to_train_that_is_not_there_is_one_line(tmp_path):
    config = HubConfig(data=tmp_path / "hub", runs=tmp_path, port=0, models=tmp_path, train_models=["none"])
    with pytest.raises(UserError, match=r"train_models: no model 'none' in .*; there are: none"):
        serve_hub(config, lambda url, link: None)
