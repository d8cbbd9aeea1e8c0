"""`mettle data generate`: a set from an environment or an evaluation, and after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from tests.serving import handler_on_a_thread

SOURCE = Path(__file__).resolve().parents[2] / "src"
MODULE = """
import mettle.envs as vf

def load_environment():
    def same(completion, answer, **_):
        return float(completion[-1]["content"] == answer)

    rows = [{"question": f"say {index}", "answer": str(index)} for index in range(40)]
    held = [{"question": f"say {index}", "answer": str(index)} for index in range(100, 110)]
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=held, system_prompt="Say it.", rubric=vf.Rubric(funcs=[same]))
"""


class Sayer:
    """Says what it is asked to; every third request, something else."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.on_request: Callable[[int], None] = lambda number: None
        self.url = ""


@pytest.fixture
def sayer() -> Iterator[Sayer]:
    """The endpoint, at `sayer.url`."""
    state, lock = Sayer(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                state.asked.append(body["messages"][-1]["content"])
                number = len(state.asked)
            state.on_request(number)
            said = "wrong" if number % 3 == 0 else body["messages"][-1]["content"].split()[-1]
            message = {"role": "assistant", "content": said}
            answer = {"id": "1", "created": 1, "model": "m", "choices": [{"message": message, "finish_reason": "stop"}]}
            data = json.dumps(answer).encode()
            try:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                self.wfile.flush()
            except OSError:
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    with handler_on_a_thread(Handler) as url:
        state.url = f"{url}/v1"
        yield state


@pytest.fixture
def workplace(mettle: Any, tmp_path: Path) -> Path:
    """An environment of its own, in the folder where commands run."""
    folder = tmp_path / "environments" / "sayings"
    folder.mkdir(parents=True)
    (folder / "sayings.py").write_text(MODULE)
    (folder / "pyproject.toml").write_text('[project]\nname = "sayings"\nversion = "0.3.0"\n')
    return tmp_path


def test_a_set_is_made_of_training_rows_and_says_what_was_left_out(mettle, workplace, sayer):
    words = ("data", "generate", "sayings", "-m", "m", "-b", sayer.url, "-n", "20", "-r", "3", "--held-out", "0.3")
    ended = mettle(*words, "-o", "set", "--json")
    assert ended.code == 0, ended.err
    assert ended.json["num_rollouts"] == 60
    assert ended.json["train"]["chats"] + ended.json["held_out"]["chats"] == 20 - ended.json["num_tasks_without_a_row"]
    assert ended.json["left_out"]["reward below the threshold"] == 20
    lines = [json.loads(line) for line in (workplace / "set/train.jsonl").read_text().splitlines()]
    for line in lines:
        asked, said = line["messages"][-2]["content"], line["messages"][-1]["content"]
        assert asked == f"say {said}"
        assert int(said) < 40, "evaluation rows are no training data"
        assert line["provenance"]["environment"] == "sayings@0.3.0"
        assert line["provenance"]["reward"] == 1.0
    assert (workplace / "set/held_out.jsonl").read_text()


def test_the_same_command_again_asks_nothing_and_more_rollouts_only_what_is_missing(mettle, workplace, sayer):
    words = ("data", "generate", "sayings", "-m", "m", "-b", sayer.url, "-r", "2", "-o", "set")
    assert mettle(*words, "-n", "10").code == 0
    first = (workplace / "set/train.jsonl").read_text().splitlines()
    assert len(sayer.asked) == 20
    ended = mettle(*words, "-n", "10")
    assert ended.code == 0, ended.err
    assert len(sayer.asked) == 20
    assert len((workplace / "set/train.jsonl").read_text().splitlines()) == len(first)
    assert mettle(*words, "-n", "15").code == 0
    assert len(sayer.asked) == 30
    ended = mettle("data", "generate", "sayings", "-m", "other", "-b", sayer.url, "-r", "2", "-n", "10", "-o", "set")
    assert ended.code == 2
    assert "its model is 'm'" in ended.err


def test_an_attempt_in_which_everything_failed_does_not_block_the_next(mettle, workplace, sayer):
    words = ("data", "generate", "sayings", "-b", sayer.url, "-r", "2", "-n", "5", "-o", "set")
    nobody = ("-b", "http://127.0.0.1:9/v1", "--max-retries", "0")
    failed = mettle("data", "generate", "sayings", "-m", "m", *nobody, "-r", "3", "-n", "2", "-o", "set")
    assert failed.code == 3
    ended = mettle(*words, "-m", "other", "--json")
    assert ended.code == 0, ended.err
    assert ended.json["num_rollouts"] == 10
    assert ended.json["source"]["model"] == "other"


def test_a_saved_evaluation_becomes_a_set(mettle, workplace, sayer):
    assert mettle("eval", "run", "sayings", "-m", "m", "-b", sayer.url, "-n", "6", "-r", "2", "-o", "results").code == 0
    [folder] = [path.parent for path in (workplace / "results").rglob("metadata.json")]
    ended = mettle("data", "generate", "--from", folder, "-o", "set", "--held-out", "0", "-f", "jsonl,parquet")
    assert ended.code == 0, ended.err
    assert "next: " in ended.out
    assert (workplace / "set/train.parquet").exists()
    summary = json.loads((workplace / "set/summary.json").read_text())
    num_lines = len((workplace / "set/train.jsonl").read_text().splitlines())
    assert num_lines == 6 - summary["num_tasks_without_a_row"]
    assert num_lines >= 4, "four of twelve answers are wrong"
    assert summary["source"]["environment"] == "sayings@0.3.0"
    assert mettle("data", "inspect", "set/train.jsonl").code == 0


@pytest.mark.slow
def test_a_killed_command_goes_on_without_repeating_a_finished_rollout(mettle, workplace, sayer):
    words = ["data", "generate", "sayings", "-m", "m", "-b", sayer.url, "-n", "20", "-r", "2", "-c", "1", "-o", "set"]
    process: list[subprocess.Popen[bytes]] = []

    def kill(number: int) -> None:
        if number == 17:
            process[0].kill()

    sayer.on_request = kill
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    process.append(
        subprocess.Popen([sys.executable, "-m", "mettle.cli", *words], env=environment, stderr=subprocess.DEVNULL)
    )
    assert process[0].wait(60) == -signal.SIGKILL
    sayer.on_request = lambda number: None
    ended = mettle(*words)
    assert ended.code == 0, ended.err
    assert len(sayer.asked) <= 41, "at most what was in flight is asked again"
    assert ended.out.count("40 of 20 tasks") == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "say either which environment to run, or with --from which saved evaluation"),
        (("sayings",), "say which model with -m"),
        (("--from", "nowhere"), "no evaluation in nowhere"),
        (("--from", "x", "-f", "csv"), "--format: formats.0 = \"csv\": input should be 'jsonl' or 'parquet'"),
        (("sayings", "-m", "m", "--held-out", "1"), "--held-out: held_out = 1: input should be less than or equal to"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(mettle, workplace, words, complaint):
    ended = mettle("data", "generate", *words)
    assert ended.code == 2
    assert complaint in ended.err
    assert ended.err.count("\n") == 1
