"""`mettle inference`: chat with an endpoint, serve a model of our own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mettle.cli.local_server import model_directory


def test_one_question_is_answered(mettle, endpoint):
    ended = mettle("inference", "chat", "-b", endpoint, "-q", "reverse badge")
    assert (ended.code, ended.out) == (0, "egdab\n")


def test_one_question_as_json(mettle, endpoint):
    found = mettle("inference", "chat", "-b", endpoint, "-q", "reverse badge", "--json").json
    assert found == {"model": "reverser", "prompt": "reverse badge", "answer": "egdab"}


def test_a_conversation_goes_on_until_the_input_ends(endpoint):
    done = subprocess.run(
        [sys.executable, "-m", "mettle.cli", "inference", "chat", "-b", endpoint],
        input="say abc\nsay def\n", capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cba", "fed"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("chat",), 2, "name a model directory or an endpoint"),
        (("chat", "nowhere"), 2, "no model in nowhere: it has no config.json"),
        (("serve", "nowhere"), 2, "no model in nowhere"),
        (("chat", "-b", "http://127.0.0.1:9/v1", "-q", "x"), 3, "is a server running there?"),
        (("chat", "-b", "http://127.0.0.1:9/v1", "-k", "NO_SUCH_KEY", "-q", "x"), 2, "NO_SUCH_KEY is not set"),
        (("chat", "-b", "http://127.0.0.1:9/v1", "--json"), 2, "--json goes with -q"),
    ],
)
def test_what_cannot_be_done_is_one_line(mettle, words, code, message):
    ended = mettle("inference", *words)
    assert ended.code == code
    assert message in ended.err
    assert ended.err.count("\n") == 1


def test_an_endpoints_own_error_is_told(mettle, endpoint):
    ended = mettle("inference", "chat", "-b", endpoint, "-q", "break")
    assert ended.code == 3
    assert "status 500: it broke" in ended.err


@pytest.mark.e2e
def test_a_model_directory_is_asked(mettle, model):
    ended = mettle("inference", "chat", model, "-q", "hello", "-t", "4", "-T", "0", "--json")
    assert ended.code == 0, ended.err
    assert ended.json["model"] == "policy"


@pytest.mark.e2e
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_server_that_is_stopped_leaves_no_process(model, number, code):
    process = subprocess.Popen(
        [sys.executable, "-m", "mettle.cli", "inference", "serve", str(model), "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("serving policy at http://127.0.0.1:")
    (child,) = _children(process.pid)
    process.send_signal(number)
    process.communicate(timeout=100)
    assert process.returncode == code
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def test_a_run_without_a_policy_is_not_mistaken_for_its_untrained_model(mettle, tmp_path):
    run = tmp_path / "runs" / "young"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text("{}")
    (run / "run.db").touch()
    for name in ("young", str(run)):
        ended = mettle("inference", "chat", name, "-q", "hello")
        assert ended.code == 2
        assert "has no policy yet" in ended.err
        assert f"`mettle rl resume {name}`" in ended.err


def test_a_run_is_meant_by_its_name(mettle, tmp_path):
    policy = tmp_path / "runs" / "done" / "policy"
    policy.mkdir(parents=True)
    (policy / "config.json").write_text("{}")
    (policy.parent / "run.db").touch()
    assert model_directory(Path("done")) == policy.resolve()
