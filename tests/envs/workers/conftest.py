"""An environment that can be told to misbehave, and a model endpoint that waits until it is told to answer."""

from __future__ import annotations

import asyncio
import sys

import pytest
from aiohttp import web

MODULE = """
import os, time
import mettle.envs as vf

def fits(completion, answer):
    return float(completion[-1]["content"] == answer)

class Troubled(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="more")]

    async def setup_state(self, state):
        state["pid"], state["handle"], state["note"] = os.getpid(), object(), {"seen": [1]}
        trouble = state["info"].get("trouble")
        if trouble == "die":
            os._exit(7)
        if trouble == "block":
            time.sleep(60)
        if trouble == "raise":
            raise vf.SandboxError("no sandbox")
        if trouble == "own":
            raise KeyError("mine")

def load_environment(num_rows=4, trouble=None, fails=None):
    if fails == "exit":
        os._exit(3)
    while fails == "waits" and os.path.exists(os.environ["TROUBLED_WAITS"]):
        time.sleep(0.02)
    if fails and fails != "waits":
        raise ValueError(fails)
    rows = [{"question": f"q{i}", "answer": "fine", "info": {"trouble": trouble}} for i in range(num_rows)]
    odd = [{"question": "q", "picture": object()}] if trouble == "odd rows" else rows
    return Troubled(dataset=odd, max_turns=2, rubric=vf.Rubric([fits]))
"""


@pytest.fixture
def troubled(tmp_path, monkeypatch):
    """The folder of the environment `troubled`, on the search path."""
    home = tmp_path / "environments" / "troubled"
    home.mkdir(parents=True)
    (home / "troubled.py").write_text(MODULE)
    (home / "pyproject.toml").write_text('[project]\nname = "troubled"\nversion = "0.3.0"\n')
    monkeypatch.setenv("METTLE_ENVIRONMENTS", str(home.parent))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield home
    sys.modules.pop("troubled", None)


class Endpoint:
    """Chat completions that say `fine`, once `answers` is set."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked = asyncio.Condition()
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        await request.read()
        async with self.asked:
            self.num_asked += 1
            self.asked.notify_all()
        await self.answers.wait()
        message = {"role": "assistant", "content": "fine"}
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
        choice = {"index": 0, "finish_reason": "stop", "message": message, "token_ids": [7, 8]}
        choice["logprobs"] = {"content": [{"logprob": -0.5}, {"logprob": -0.25}]}
        body = {"id": "r", "model": "m", "choices": [choice], "usage": usage, "prompt_token_ids": [1, 2, 3]}
        return web.json_response(body)

    async def until_asked(self, times: int) -> None:
        """Wait until so many requests have come in."""
        async with asyncio.timeout(30), self.asked:
            await self.asked.wait_for(lambda: self.num_asked >= times)


@pytest.fixture
async def endpoint():
    made = Endpoint()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", made.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield made
    made.answers.set()
    await runner.cleanup()
