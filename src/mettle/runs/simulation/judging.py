"""Rewards by judges in simulated time: real environments with real rubrics, in front of a judge that is not there.

    rollout in a worker ─ EnvironmentGroups ─ JudgeRubric ─ ModelTransport ══ SimulatedNetwork ══ SimulatedJudge
                                              CodeRubric ─ RemoteJudge ══ SimulatedNetwork ══ a sandbox service

Parts: `JudgeHabits` and `SimulatedJudge` (a judge model's endpoint, no process of the run), `reward_of` (what the text
of a rollout is worth where every judge answers), `JudgedRollouts` (the environments of each process that rolls out).
How a rollout is scored, limited, tried again and recorded is what a run does, but for its sockets. Invariant: what a
judge says of a text, and how it fails on it, depends on the text and on how often it was asked, and not on the order.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Literal

import aiohttp
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response as HttpAnswer
from starlette.routing import Route

from mettle.clients.base import Client
from mettle.clients.endpoint_clients import OpenAIChatCompletionsClient
from mettle.clients.transport import ModelTransport, RetryPolicy
from mettle.envs.pacing import pace
from mettle.envs.rubrics.code_rubric import CodeRubric
from mettle.envs.rubrics.judge_rubric import JudgeRubric
from mettle.envs.rubrics.rubric import Rubric
from mettle.envs.rubrics.rubric_group import RubricGroup
from mettle.envs.sandboxes.shared import SANDBOX_ENV
from mettle.envs.singleturn_env import SingleTurnEnv
from mettle.evals.source import GroupRequest
from mettle.orchestrator.environments import EnvironmentGroups
from mettle.orchestrator.simulator import SimulatedEngine, SimulatedWorld
from mettle.records.messages import Response, ResponseMessage, ResponseTokens
from mettle.records.tasks import RolloutRecord
from mettle.runs.simulation.host import Life, SimulatedHost
from mettle.runs.simulation.sandboxes import passes
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.protocols import Judge
from mettle.sandbox.service.client.access import ServiceAccess
from mettle.sandbox.service.client.judge import RemoteJudge
from mettle.web.server import HttpServer

JUDGE: Final = "judge"
URL: Final = f"http://{JUDGE}/v1"
NUM_TOKENS: Final = 4
_WORTH: Final = re.compile(r"worth (\d\.\d{6})")
_NONSENSE: Final = ("I would rather not say.", "", None, "nan")
Mood = Literal["", "refusing", "babbling"]
_REQUEST: ContextVar[GroupRequest] = ContextVar("request")


@dataclass(frozen=True, slots=True)
class JudgeHabits:
    """How a judge answers. Rates are shares of what it is asked."""

    answer_s: float = 0.5
    """On average; four times that at most."""
    refusal_rate: float = 0.0
    """Of questions that are refused, with 429, 500 or 503; asked again, another draw."""
    nonsense_rate: float = 0.0
    """Of texts of which it says nothing that is a verdict, however often it is asked."""
    silence_rate: float = 0.0
    """Of texts about which it never answers."""
    is_asked_of_groups: bool = False
    """One question about all rollouts of a group, in place of one about each."""


def worth_of(text: str) -> list[float]:
    """What the rollouts in a text are worth, in their order; a judge's verdict on each."""
    return [float(found) for found in _WORTH.findall(text)]


def reward_of(text: str, *, has_tests: bool) -> float:
    """The reward of a rollout that said `text`, where every judge of it answers."""
    (worth,) = worth_of(text)
    return worth + (has_tests and passes(text.partition("print")[2]))


class SimulatedJudge:
    """An endpoint that lives somewhere else: the run can neither end nor start it."""

    def __init__(self, habits: JudgeHabits, host: SimulatedHost, seed: int) -> None:
        self.mood: Mood = ""
        self._habits = habits
        self._host = host
        self._seed = seed
        self._num_asked: Counter[str] = Counter()
        self.num_answers = 0

    def start(self) -> None:
        """From now on it answers, after a while."""
        Life(self._host, JUDGE, self._serve, is_outside=True)

    async def _serve(self, life: Life) -> int:
        app = Starlette(routes=[Route("/v1/chat/completions", self._answer, methods=["POST"])])
        server = HttpServer(app, socket.socket(socket.AF_UNIX))
        await server.start()
        life.host.loop.network.names[JUDGE] = life.pid
        try:
            await asyncio.Event().wait()
        finally:
            await server.stop()
        return 0

    async def _answer(self, request: Request) -> HttpAnswer:
        try:
            text = str((await request.json())["messages"][-1]["content"])
            status, content = await self._verdict(text)
        except (asyncio.CancelledError, ClientDisconnect):  # it is killed, or whoever asked has gone
            status, content = 503, b""
        return HttpAnswer(content, status, media_type="application/json")

    async def _verdict(self, text: str) -> tuple[int, bytes]:
        """Status and body of the answer to a question."""
        habits = self._habits
        self._num_asked[text] += 1
        always = random.Random(f"{self._seed}/{text}")
        luck = random.Random(f"{self._seed}/{text}/{self._num_asked[text]}")
        fate = always.random()
        if fate < habits.silence_rate:
            await asyncio.Event().wait()
        await asyncio.sleep(min(4.0, luck.expovariate(1.0)) * habits.answer_s)
        if self.mood == "refusing" or luck.random() < habits.refusal_rate:
            return luck.choice([429, 500, 503]), b'{"error": {"message": "not now"}}'
        said: str | None = " ".join(f"{worth:.6f}" for worth in worth_of(text))
        if self.mood == "babbling" or habits.silence_rate <= fate < habits.silence_rate + habits.nonsense_rate:
            said = always.choice(_NONSENSE)
        if said is None:
            return 200, b"<html>welcome</html>"
        self.num_answers += 1
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return 200, json.dumps({"id": "x", "created": 0, "model": JUDGE, "choices": [choice]}).encode()


class _Connector(aiohttp.UnixConnector):
    """Connects over the simulated network to whatever process the judge is now."""

    def __init__(self) -> None:
        super().__init__(path=JUDGE, limit=0)


class _Transport(ModelTransport):
    """The real one, but for its sockets."""

    def _new_session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=self._connect_timeout_s)
        return aiohttp.ClientSession(connector=_Connector(), timeout=timeout, headers=self.headers)


def _judge_client(rng: random.Random) -> OpenAIChatCompletionsClient:
    client = OpenAIChatCompletionsClient(URL)
    client.endpoint.transport = _Transport(URL, retry=RetryPolicy(), rng=rng)
    return client


async def verdict(judge: Any, prompt: Any, completion: Any, answer: Any, state: Any) -> float:
    """What the judge says of one rollout."""
    return float(await judge(prompt, completion, answer, state))


async def compared(judge_client: Any, judge_model: str, completions: list[Any]) -> list[float]:
    """What the judge says of a group, in one answer."""
    text = "\n".join(completion[-1]["content"] for completion in completions)
    messages = [{"role": "user", "content": text}]
    found = await judge_client.chat.completions.create(model=judge_model, messages=messages)
    return [float(word) for word in found.choices[0].message.content.split()]


class _TestedCode(CodeRubric):
    """Code that is judged at the services of a run."""

    def __init__(self, config: SandboxConfig, access: ServiceAccess, rng: random.Random) -> None:
        super().__init__(sandbox=config)
        self._access, self._rng = access, rng

    def _open_judge(self) -> Judge:
        return RemoteJudge(self.sandbox, access=self._access, rng=self._rng)


class _Policy(Client):
    """The engine, as rollouts ask it; `position` is the rollout's in its group."""

    def __init__(self, groups: _Groups, position: int = 0) -> None:
        super().__init__()
        self._groups = groups
        self._position = position

    def for_group(self, size: int) -> list[_Policy]:
        """One for each rollout."""
        return [_Policy(self._groups, position) for position in range(size)]

    async def get_response(self, prompt: Any, model: str, *_: Any, **__: Any) -> Response:
        """Four tokens that are the task's draw, and a text that says what the rollout is worth."""
        request, world = _REQUEST.get(), self._groups.world
        luck = random.Random(f"{world.seed}/{request.sampling.seed}")
        is_equal = luck.random() < world.equal_rate
        own = random.Random(f"{world.seed}/{request.sampling.seed}/{self._position}")
        speed = random.Random(f"{world.pace_seed}/{request.prefix}/{self._groups.num_calls}/{self._position}")
        versions = await self._groups.engine.sample(
            NUM_TOKENS, speed.expovariate(1.0) * world.rollout_s / NUM_TOKENS if world.rollout_s else 0.0
        )
        worth = 0.5 if is_equal else 0.05 + (self._position % 2) * 0.5 + own.random() * 0.1
        draw = 0 if request.is_eval else int(request.prefix[1:])
        tokens = ResponseTokens([7, 8], [draw] * NUM_TOKENS, [-0.5] * NUM_TOKENS, versions)
        text = f"{request.prefix}-{self._position} is worth {worth:.6f}\n```python\nprint({worth:.6f})\n```"
        message = ResponseMessage(content=text, finish_reason="stop", is_truncated=False, tokens=tokens)
        return Response(id="x", created=0, model=model, usage=None, message=message)


class _Groups(EnvironmentGroups):
    """The environments of one process."""

    def __init__(
        self, env: SingleTurnEnv, names: list[str], world: SimulatedWorld, engine: SimulatedEngine, timeout_s: float
    ) -> None:
        everything = dict.fromkeys(names, env)
        super().__init__(everything, everything, "policy", timeout_s=timeout_s)
        self.world, self.engine = world, engine
        self.num_calls = 0

    def client_of(self, env: Any, trains_at: float | None) -> _Policy:
        return _Policy(self)

    async def run_group(self, request: GroupRequest) -> tuple[RolloutRecord, ...]:
        """As of every environment; the policy knows for which request it samples."""
        self.num_calls += 1
        _REQUEST.set(request)
        return await super().run_group(request)


class JudgedRollouts:
    """The environments of each process that rolls out; they end with it."""

    def __init__(
        self,
        habits: JudgeHabits,
        world: SimulatedWorld,
        engine: SimulatedEngine,
        host: SimulatedHost,
        names: list[str],
        timeout_s: float,
    ) -> None:
        self._habits, self._world, self._engine, self._host = habits, world, engine, host
        self._names, self._timeout_s = names, timeout_s
        self._groups: dict[int, _Groups] = {}
        pace(host.loop, float("inf"))  # how long something takes on this host must not decide who goes first

    async def run_group(self, request: GroupRequest) -> tuple[RolloutRecord, ...]:
        """In the process that asks."""
        life = self._host.current
        groups = self._groups.get(life.pid)
        if groups is None:
            groups = self._groups[life.pid] = self._made(life)
        return await groups.run_group(request)

    async def close(self, life: Life) -> None:
        """The process has ended."""
        if (groups := self._groups.pop(life.pid, None)) is not None:
            await groups.close()

    def _made(self, life: Life) -> _Groups:
        rng = random.Random(f"{self._world.pace_seed}/{life.pid}")
        rows: list[dict[str, Any]] = [
            {"question": f"task {number}", "answer": "", "info": {"tests": [{"stdin": "", "expected": "1"}]}}
            for number in range(self._world.num_tasks)
        ]
        env = SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=Rubric())
        env.rubric = self._rubric(life.environment, rng)  # without the monitor of turns, which runs in a thread
        return _Groups(env, self._names, self._world, self._engine, self._timeout_s)

    def _rubric(self, environment: Mapping[str, str], rng: random.Random) -> Rubric:
        async def wait(_: float) -> None:
            await asyncio.sleep(rng.uniform(0.25, 0.5))

        function = compared if self._habits.is_asked_of_groups else verdict
        judged = JudgeRubric(judge_client=_judge_client(rng), judge_model=JUDGE, funcs=[function], sleep=wait)
        if SANDBOX_ENV not in environment:
            return judged
        config = SandboxConfig.model_validate_json(environment[SANDBOX_ENV])
        access = ServiceAccess(environment.get(config.token_env), config.ca_file, config.plain_http)
        return RubricGroup([judged, _TestedCode(config, access, rng)])
