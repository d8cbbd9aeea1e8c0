"""A command runner, a run on disk, and an endpoint that answers like a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.serving import handler_on_a_thread

from mettle.cli import main
from mettle.storage.ledger import Ledger

sys.path.append(str(Path(__file__).parent))  # for the helpers beside the tests

from own_service import _isolated, own

__all__ = ["_isolated", "own"]


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def mettle(capsys, tmp_path, monkeypatch) -> Callable[..., Ended]:
    """Run `mettle` with these words, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(*words: object) -> Ended:
        capsys.readouterr()
        code = main.run([str(word) for word in words])
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """A finished run of three steps, with logs."""
    path = tmp_path / "runs" / "words"
    ledger = Ledger(path / "run.db")
    for key, value in {"name": "words", "state": "finished", "max_steps": 3, "created_at": 1.0}.items():
        ledger.journal.set_fact(key, value)
    for step, reward in enumerate((0.25, 0.5, 0.75), start=1):
        ledger.journal.record_metrics(step, {"reward/mean": reward, "loss/mean": 1.0 / step})
    ledger.close()
    logs = path / "logs"
    logs.mkdir()
    for name, times in {"trainer": (1.0, 3.0), "orchestrator": (2.0, 4.0)}.items():
        lines = [
            {"time": t, "level": "info", "logger": f"mettle.{name}", "message": f"at {t:g}", "step": 1} for t in times
        ]
        (logs / f"{name}.log").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (logs / "trainer.out").write_text("Traceback: the cause\n")
    return path


class _Answers(BaseHTTPRequestHandler):
    """Chat completions that reverse the last word of the last message; status 500 when it is `break`."""

    seen: ClassVar[list[tuple[dict[str, str], dict[str, Any]]]] = []
    """Headers and body of each request."""

    def do_GET(self) -> None:
        self._json({"data": [{"id": "reverser"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((dict(self.headers), body))
        word = body["messages"][-1]["content"].split()[-1]
        if word == "break":
            self._json({"error": {"message": "it broke"}}, 500)
        elif body.get("stream"):
            self._stream(word[::-1])
        else:
            message = {"role": "assistant", "content": word[::-1]}
            usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self._json({"id": "x", "created": 1, "model": body["model"], "choices": [choice], "usage": usage})

    def _stream(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for piece in text:
            event = {"choices": [{"index": 0, "delta": {"content": piece}}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _json(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def seen(endpoint) -> list[tuple[dict[str, str], dict[str, Any]]]:
    """Headers and body of each request that the endpoint gets."""
    _Answers.seen.clear()
    return _Answers.seen


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Base URL of an endpoint that reverses words."""
    with handler_on_a_thread(_Answers) as url:
        yield f"{url}/v1"


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """The directory of a tiny model with nothing learned."""
    pytest.importorskip("torch")
    from mettle.trainer.policy import write_policy
    from mettle.trainer.presets import preset

    return write_policy(tmp_path_factory.mktemp("model") / "tiny", preset("tiny"))
