"""A proxy on the loopback in front of a model that says what it is told, with one rollout open on it."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

import mettle.envs as vf
from mettle.envs.cli_agent_env import CliAgentEnv
from mettle.envs.proxy.recorder import Recorder
from mettle.envs.proxy.server import ProxyListener, ProxyServer
from mettle.envs.proxy.sessions import AgentSession
from mettle.envs.state import State

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI


@dataclass
class Rollout:
    """One rollout on the proxy, and ways to call it."""

    env: CliAgentEnv
    state: State
    session: AgentSession
    recorder: Recorder
    root: str

    @property
    def steps(self) -> list[Any]:
        return self.state["trajectory"]

    def openai(self, **options: Any) -> AsyncOpenAI:
        import openai

        return openai.AsyncOpenAI(base_url=f"{self.root}/v1", api_key=self.session.secret, **options)

    def anthropic(self, **options: Any) -> AsyncAnthropic:
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.root, api_key=self.session.secret, **options)

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Raw HTTP: status and body."""
        sent = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        given = {"Authorization": f"Bearer {self.session.secret}", **headers}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.root}{path}", data=sent, headers=given) as answer,
        ):
            return answer.status, await answer.json()


class Proxied:
    """Opens rollouts on one proxy."""

    def __init__(self, proxy: ProxyServer, listener: ProxyListener) -> None:
        self.proxy = proxy
        self.root = f"http://127.0.0.1:{listener.port}"

    async def rollout(self, client: Any, **options: Any) -> Rollout:
        model_args = options.pop("sampling_args", None)
        max_calls = options.pop("max_calls", 32)
        env = CliAgentEnv("true", dataset=[{"question": "q"}], rubric=vf.Rubric(), **options)
        state = await env.init_state(env.get_dataset()[0], client, "policy", model_args)
        recorder = Recorder(env, state)
        session = self.proxy.open(recorder, "policy", max_calls=max_calls)
        recorder.session = session
        return Rollout(env, state, session, recorder, self.root)


@pytest.fixture
async def proxied() -> AsyncIterator[Proxied]:
    proxy = ProxyServer(max_body_bytes=16 << 20, heartbeat_s=0.05)
    listener = await proxy.listen()
    yield Proxied(proxy, listener)
    await proxy.close()
