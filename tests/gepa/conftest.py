"""An environment of three kinds of tasks, and an endpoint that does each kind only when the system prompt asks for it.

The endpoint's other model, `writer`, reflects as a model would: it reads the prompt and the examples that it is shown,
and adds the rule that the first failed example needs. So a search improves the reward, and nothing of it is mocked.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from tests.serving import handler_on_a_thread

MODULE = """
import mettle.envs as vf

KINDS = {"add": lambda a, b: str(a + b), "join": lambda a, b: f"{a}{b}", "first": lambda a, b: str(a)}

def load_environment(num_rows: int = 60, system_prompt: str = "Answer.", fails: bool = False):
    def exact(completion, answer, **_):
        said = completion[-1]["content"]
        if fails and said == "BROKEN":
            raise ValueError("cannot read BROKEN")
        return float(said == answer)

    def rows(start):
        kinds = list(KINDS)
        for index in range(start, start + num_rows):
            kind, a, b = kinds[index % 3], index % 7, index
            yield {"question": f"{kind} {a} {b}", "answer": KINDS[kind](a, b)}

    return vf.SingleTurnEnv(
        dataset=list(rows(0)), eval_dataset=list(rows(1000)), system_prompt=system_prompt, rubric=vf.Rubric(funcs=[exact])
    )
"""
MANIFEST = '[project]\nname = "three-kinds"\nversion = "0.1.0"\n'


class Endpoint:
    """What the endpoint was asked, and levers to make it fail."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.fail: Callable[[str, dict[str, Any]], int | None] = lambda model, body: None
        self.on_request: Callable[[int], None] = lambda number: None
        self.lock = threading.Lock()
        self.url = ""

    @property
    def worked(self) -> Counter[str]:
        """How often each prompt was put to the worker."""
        return Counter(text for model, text in self.asked if model == "worker")

    @property
    def num_reflections(self) -> int:
        return sum(model == "writer" for model, _ in self.asked)

    def answer(self, body: dict[str, Any]) -> tuple[int, str]:
        model, messages = body["model"], body["messages"]
        with self.lock:
            self.asked.append((model, json.dumps(messages)))
            number = len(self.asked)
        self.on_request(number)
        status = self.fail(model, body)
        if status is not None:
            return status, "failed on purpose"
        return 200, _reflect(messages[-1]["content"]) if model == "writer" else _work(messages)


def _work(messages: list[dict[str, Any]]) -> str:
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    kind, a, b = messages[-1]["content"].split()
    if f"rule {kind}" not in system:
        return "I do not know."
    return {"add": str(int(a) + int(b)), "join": f"{a}{b}", "first": a}[kind]


def _reflect(prompt: str) -> str:
    current = prompt.split("```")[1].strip()
    for example in re.split(r"^# Example \d+$", prompt, flags=re.MULTILINE)[1:]:
        if "Reward 1 " not in example:
            kind = example.split("## Inputs\n")[1].split()[0]
            if f"rule {kind}" not in current:
                return f"Better:\n```\n{current}\nrule {kind}\n```"
    return f"```\n{current}\n```"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """The endpoint, at `endpoint.url`."""
    state = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, text = state.answer(body)
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
            answer = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "usage": usage}
            data = json.dumps(
                {**answer, "choices": [choice]} if status == 200 else {"error": {"message": text}}
            ).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            try:
                self.wfile.write(data)
                self.wfile.flush()
            except OSError:
                self.close_connection = True  # Whoever asked was killed.

        def log_message(self, *_: Any) -> None:
            pass

    with handler_on_a_thread(Handler) as url:
        state.url = f"{url}/v1"
        yield state


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the environment `three-kinds` in it."""
    folder = tmp_path / "environments" / "three_kinds"
    folder.mkdir(parents=True)
    (folder / "three_kinds.py").write_text(MODULE)
    (folder / "pyproject.toml").write_text(MANIFEST)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("METTLE_ENVIRONMENTS", str(tmp_path / "environments"))
    return tmp_path
