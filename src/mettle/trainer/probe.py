"""Measuring a policy in the training process: weights in, mean reward out, without a server.

Parts: `RewardProbe` (what the warm-up needs), `EnvironmentProbe` (rollouts of a real environment, scored by its own
rubric), `EngineTransport` (the token route answered by the engine's scheduler in this thread). Invariant: a rollout
that failed has no reward and lowers no mean.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mettle.clients.renderer import Renderer
from mettle.clients.tokens import TokenClient
from mettle.clients.transport import ModelTransport
from mettle.envs import load_environment
from mettle.envs.environment_rollouts import EnvironmentRollouts, tasks_of
from mettle.errors import ProviderError, ServiceError
from mettle.evals.estimator import mean_of
from mettle.evals.runner import EvalRunner, StoreKeeper, requests_for
from mettle.inference.engine.architecture import read_shape
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.limits import Limits
from mettle.inference.engine.local import run_requests
from mettle.inference.engine.protocol import Generation, GenerationRequest, RequestRefused
from mettle.inference.engine.scheduler import Scheduler
from mettle.inference.engine.weights import fuse
from mettle.records.sampling import SamplingParams
from mettle.records.tasks import RolloutRecord
from mettle.storage.evals import EvalPlan, EvalStore
from mettle.trainer.config import ProbeConfig

MAX_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class ProbeReading:
    """One measurement: mean reward over the rollouts that have one."""

    mean_reward: float
    num_rollouts: int
    num_errors: int


class RewardProbe(Protocol):
    """Tells what a policy can do."""

    def measure(self, state: Mapping[str, Tensor], *, seed: int) -> ProbeReading:
        """Mean reward of the policy with these weights (Hugging Face names)."""


class EnvironmentProbe:
    """One rollout each of some training tasks of an environment. Always the same seed, the same reading."""

    def __init__(
        self, model: Path, env: Any, config: ProbeConfig, device: torch.device, store: EvalStore | None = None
    ) -> None:
        self._env = env
        self._store = store
        self._rows = env.get_dataset()
        self._config = config
        self._device = device
        self._shape = read_shape(model)
        self._renderer = Renderer.from_directory(model)

    @classmethod
    def load(
        cls, model: Path, config: ProbeConfig, device: torch.device, store: EvalStore | None = None
    ) -> EnvironmentProbe:
        """The probe of `config.env`, whose rollouts are kept in `store`."""
        assert config.env is not None, "the environment is resolved before"
        return cls(model, load_environment(config.env, **config.env_args), config, device, store)

    def measure(self, state: Mapping[str, Tensor], *, seed: int) -> ProbeReading:
        """Roll out and score."""
        return asyncio.run(
            self._measure(self.transport(state, seed, max_slots=min(256, self._config.num_prompts)), seed)
        )

    def roll_out(self, transport: EngineTransport, seed: int) -> ProbeReading:
        """Roll out and score on an engine that is there; what it sampled is in `transport.answered`."""
        return asyncio.run(self._measure(transport, seed))

    def transport(self, state: Mapping[str, Tensor], seed: int, *, max_slots: int = 256) -> EngineTransport:
        """An engine in this thread with these weights."""
        length = min(self._shape.max_positions, MAX_LENGTH)
        weights = fuse(self._shape, state, self._device, torch.float32)
        limits = Limits(max_slots, length)
        eos = self._renderer.stop_token_ids
        scheduler = Scheduler(
            Decoder(self._shape, weights, length),
            limits,
            eos_token_ids=eos,
            decode_text=self._renderer.decode,
            seed=seed,
        )
        return EngineTransport(scheduler)

    async def _measure(self, transport: EngineTransport, seed: int) -> ProbeReading:
        client = TokenClient("http://in-process/v1", self._renderer, transport=transport)
        number = min(self._config.num_prompts, len(self._rows))
        chosen = [dict(self._rows[i]) for i in random.Random(seed).sample(range(len(self._rows)), number)]
        sampling = {"temperature": self._config.temperature, "max_tokens": self._config.max_tokens}
        source = EnvironmentRollouts(self._env, client, "policy", sampling, is_split=True)
        records: list[RolloutRecord] = []
        eval_id = self._begin(number, sampling, seed)
        runner = EvalRunner(
            source,
            keeper=None if self._store is None else StoreKeeper(self._store, eval_id),
            on_rollouts=records.extend,
        )
        await runner.run(requests_for(tasks_of(chosen), env=self._env.env_id, prefix=f"e{eval_id}"))
        rewards = [record.reward for record in records if record.reward is not None]
        if self._store is not None:
            self._store.end(eval_id, mean=mean_of(rewards) if rewards else None)
        if not rewards:
            raise ServiceError(f"the warm-up cannot be measured: all {number} rollouts failed: {records[0].error}")
        return ProbeReading(mean_of(rewards), len(records), len(records) - len(rewards))

    def _begin(self, number: int, sampling: Mapping[str, Any], seed: int) -> int:
        if self._store is None:
            return 0
        about = {"env_id": self._env.env_id, "sampling_args": sampling, "seed": seed, "rollouts_per_example": 1}
        return self._store.begin(EvalPlan("probe", self._env.env_id, number, number, model="policy", metadata=about))


class EngineTransport(ModelTransport):
    """Answers `/generate` from a scheduler in this thread. Calls made side by side are sampled together."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__("http://in-process/v1")
        self.scheduler = scheduler
        self.answered: list[tuple[GenerationRequest, Generation]] = []
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[Generation]]] = []
        self._flush: asyncio.Task[None] | None = None
        self._count = 0

    async def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Sample what `body` asks for."""
        assert path == "/generate", f"the in-process engine has no {path}"
        self._count += 1
        request = GenerationRequest(
            str(self._count), body["prompt_ids"], _sampling(body), int(body.get("n", 1)),
            seeds=tuple(body.get("seeds") or ()),
        )  # fmt: skip
        try:
            self.scheduler.check(request)
        except RequestRefused as error:
            raise ProviderError(str(error)) from error
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._flush is None:
            self._flush = asyncio.create_task(self._sample_when_all_have_asked())
        return _as_body(await answer)

    async def _sample_when_all_have_asked(self) -> None:
        number = -1
        while number != len(self._waiting):
            number = len(self._waiting)
            await asyncio.sleep(0)
        self._flush, waiting, self._waiting = None, self._waiting, []
        try:
            generations = run_requests(self.scheduler, [request for request, _ in waiting])
        except ServiceError as error:
            for _, answer in waiting:
                answer.set_exception(ProviderError(str(error)))
            return
        for (request, answer), generation in zip(waiting, generations, strict=True):
            self.answered.append((request, generation))
            answer.set_result(generation)


def _sampling(body: Mapping[str, Any]) -> SamplingParams:
    names = {"max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos"}
    names |= {"presence_penalty", "frequency_penalty", "repetition_penalty"}
    given = {name: body[name] for name in names if body.get(name) is not None}
    lists: dict[str, Sequence[Any]] = {name: tuple(body.get(name) or ()) for name in ("stop", "stop_token_ids")}
    lists["logit_bias"] = tuple((int(token), value) for token, value in (body.get("logit_bias") or {}).items())
    return SamplingParams(**given, **lists)  # type: ignore[arg-type]


def _as_body(generation: Generation) -> dict[str, Any]:
    return {
        "request_id": generation.request_id,
        "model": "policy",
        "prompt_tokens": generation.num_prompt_tokens,
        "choices": [
            {
                "index": choice.index,
                "token_ids": choice.token_ids,
                "logprobs": choice.logprobs,
                "versions": choice.versions,
                "finish_reason": choice.finish_reason,
            }
            for choice in generation.choices
        ],
    }
