"""Rollouts from real environments: `mettle.envs` against the engine, token in and token out.

Parts: `EnvironmentGroups` (groups of environments that are there), `EnvironmentSource` (those of a configuration).
Environments are loaded once, at the start, here or in worker processes of their own; the client of the engine is made
anew when the engine listens somewhere else. One group is one `run_group` call, in which the client sends identical
first turns as one request.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mettle.clients.config import ClientConfig
from mettle.clients.renderer import Renderer
from mettle.clients.tokens import TokenClient
from mettle.envs import load_environment
from mettle.envs.packages.registry import find_environment
from mettle.envs.rollout_record import record_of_state
from mettle.envs.workers.endpoints import token_spec
from mettle.envs.workers.environment import WorkerEnvironment
from mettle.envs.workers.places import WorkerPlaces
from mettle.envs.workers.pool import WorkerPool
from mettle.envs.workers.spawn import WorkerSpec
from mettle.errors import EnvironmentFault, InfraError, RolloutTimeout, UserError
from mettle.evals.output import task_key_of
from mettle.evals.source import GroupRequest
from mettle.orchestrator.config import EnvConfig, OrchestratorConfig
from mettle.orchestrator.server import EndpointFile
from mettle.records.sampling import SamplingParams, other_distribution
from mettle.records.tasks import UNSCORED, RolloutRecord
from mettle.web.keys import API_KEY_ENV

Rows = Sequence[Mapping[str, Any]]

STRAGGLER_SHARE = 0.9
"""Share of a group's time that one rollout may take."""


class EnvironmentGroups:
    """Groups of environments by name, for training and for evaluation, within `timeout_s` each.

    A subclass has `client_of`, the policy as one of the environments asks it.
    """

    def __init__(self, train: Mapping[str, Any], evaluated: Mapping[str, Any], model: str, *, timeout_s: float) -> None:
        self._model = model
        self._train, self._eval = train, evaluated
        for name, env in train.items():
            _check_sampling(name, env)
        self._limited = _limit_time({id(env): env for env in self._all}.values(), timeout_s)
        self._train_rows: dict[str, Rows] = {name: env.get_dataset() for name, env in train.items()}
        self._eval_rows: dict[str, Rows] = {name: env.get_eval_dataset() for name, env in evaluated.items()}

    @property
    def _all(self) -> list[Any]:
        return [*self._train.values(), *self._eval.values()]

    @abstractmethod
    def client_of(self, env: Any, trains_at: float | None) -> Any:
        """The policy for one group; `trains_at` is the temperature of one that is to be trained."""

    def num_tasks(self, env: str, *, is_eval: bool = False) -> int:
        """Rows of the training or the evaluation split."""
        return len((self._eval_rows if is_eval else self._train_rows)[env])

    def uid(self, env: str, example_id: int, *, is_eval: bool = False) -> str:
        """A digest of what the row asks and expects."""
        return task_key_of((self._eval_rows if is_eval else self._train_rows)[env][example_id])

    def provides_advantages(self, env: str) -> bool:
        """What the environment says of itself."""
        return bool(getattr(self._train[env], "provides_advantages", False))

    def figures(self) -> dict[str, float]:
        """For each environment in worker processes: the worst lag of their event loops, their memory, their deaths."""
        found: dict[str, float] = {}
        for name, env in {**self._eval, **self._train}.items():
            if isinstance(env, WorkerEnvironment):
                pool = env.pool
                found[f"env_workers/{name}/lag_max_ms"] = pool.take_max_lag_s() * 1000
                found[f"env_workers/{name}/rss_max_mib"] = max((w.max_rss_bytes for w in pool.stats), default=0) / 2**20
                found[f"env_workers/{name}/deaths"] = float(pool.num_deaths)
        return found

    async def run_group(self, request: GroupRequest) -> tuple[RolloutRecord, ...]:
        """Roll out one group. Failed rollouts are records; what escapes the environment, the caller records."""
        rows = (self._eval_rows if request.is_eval else self._train_rows)[request.env]
        env = (self._eval if request.is_eval else self._train)[request.env]
        row = rows[request.example_id]
        inputs = [dict(row) for _ in range(request.size)]
        trains_at = None if request.is_eval else request.sampling.temperature
        client = self.client_of(env, trains_at)
        states = await env.run_group(inputs, client, self._model, sampling_args(request.sampling))
        if id(env) in self._limited:
            _blame_time(states)
        uid, temperature = task_key_of(row), request.sampling.temperature
        has_advantages = bool(getattr(env, "provides_advantages", False))
        records = (
            record_of_state(
                state,
                rollout_id,
                uid=uid,
                position=position,
                temperature=temperature,
                has_advantages=has_advantages,
                is_for_training=not request.is_eval,
            )
            for state, (rollout_id, position) in zip(states, request.rollouts, strict=True)
        )
        return tuple(map(_scored, records))

    async def close(self) -> None:
        """Tear the environments down."""
        for env in {id(env): env for env in self._all}.values():
            await env.teardown()


class EnvironmentSource(EnvironmentGroups):
    """The environments of a configuration."""

    def __init__(
        self,
        config: OrchestratorConfig,
        endpoint: EndpointFile,
        model_dir: Path,
        *,
        on_death: Callable[[str], None] = lambda text: None,
        places: WorkerPlaces | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._model_dir = model_dir
        self._renderer = Renderer.from_directory(model_dir)
        self._clients: dict[float | None, TokenClient] = {}
        self._client_url = ""
        self._old_clients: list[TokenClient] = []
        loaded: dict[str, Any] = {}

        def load(envs: Iterable[EnvConfig]) -> dict[str, Any]:
            return {env.name: _load(env, loaded, num_workers_of(env, config), on_death, places) for env in envs}

        train, evaluated = load(config.envs), load(config.eval_envs if config.eval.num_examples != 0 else ())
        super().__init__(train, evaluated, config.served_model_name, timeout_s=config.rollout_timeout_s)

    def client_of(self, env: Any, trains_at: float | None) -> Any:
        """As a worker process connects to the engine, or the connection of this one."""
        if isinstance(env, WorkerEnvironment):
            return token_spec(self._endpoint.base_url, str(self._model_dir), API_KEY_ENV, trains_at=trains_at)
        return self._connect(trains_at)

    async def close(self) -> None:
        """Close the connections and tear the environments down."""
        for client in [*self._old_clients, *self._clients.values()]:
            await client.close()
        await super().close()

    def _connect(self, trains_at: float | None) -> TokenClient:
        url = self._endpoint.base_url
        if url != self._client_url:
            # Groups in flight still hold them; they fail by themselves, and they are closed at the end.
            self._old_clients += self._clients.values()
            self._clients.clear()
            self._client_url = url
        if trains_at not in self._clients:
            endpoint = ClientConfig(api_base_url=url, api_key_var=API_KEY_ENV)
            self._clients[trains_at] = TokenClient(endpoint, self._renderer, trains_at=trains_at)
        return self._clients[trains_at]


def _check_sampling(name: str, env: Any) -> None:
    """Raises: UserError for an environment whose own arguments would train what the policy did not say."""
    if other := other_distribution(getattr(env, "sampling_args", None) or {}):
        asked = ", ".join(f"{field} = {value}" for field, value in sorted(other.items()))
        raise UserError(
            f"environment {name!r} samples with {asked} of its own, so the recorded logprobs would not be the policy's "
            "and the importance ratio biased: leave that out of its sampling_args to train on it (evaluating is fine)"
        )


def _scored(record: RolloutRecord) -> RolloutRecord:
    """A rollout that ends without a reward and an error is the environment's fault, and is tried again as such."""
    if record.error_kind != UNSCORED:
        return record
    why = "the rollout ended without a reward and an error"
    return replace(record, error_kind=EnvironmentFault.kind, error_type=EnvironmentFault.__name__, error=why)


def sampling_args(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling as the arguments that environments and clients pass on; defaults are left out."""
    found: dict[str, Any] = {"temperature": sampling.temperature}
    if sampling.max_tokens is not None:
        found["max_tokens"] = sampling.max_tokens
    if sampling.top_p < 1.0:
        found["top_p"] = sampling.top_p
    if sampling.seed is not None:
        found["seed"] = sampling.seed
    extra: dict[str, Any] = {}
    if sampling.top_k > 0:
        extra["top_k"] = sampling.top_k
    if sampling.min_p > 0.0:
        extra["min_p"] = sampling.min_p
    return found | ({"extra_body": extra} if extra else {})


def num_workers_of(env: EnvConfig, config: OrchestratorConfig) -> int:
    """Processes that an environment runs in: as its table says, else as the run does, else one in each place on a
    cluster's nodes, else by whose code it is."""
    asked = config.env_workers if env.workers is None else env.workers
    if asked is not None:
        return asked
    if config.worker_places:
        return len(config.worker_places)
    try:
        return 0 if find_environment(env.id).is_shipped else 1
    except UserError:  # it is loaded by another way, or not at all, which loading it says
        return 1


def _load(
    env: EnvConfig,
    loaded: dict[str, Any],
    num_workers: int,
    on_death: Callable[[str], None],
    places: WorkerPlaces | None,
) -> Any:
    """One instance, or one pool of workers, for equal ids and arguments, however many names it has."""
    key = f"{env.id}?{json.dumps(env.args, sort_keys=True, default=str)}#{num_workers}"
    if key not in loaded:
        try:
            if num_workers:
                home = None if places is None else places.home(num_workers)
                loaded[key] = WorkerEnvironment(
                    WorkerPool(WorkerSpec(env.id, env.args), num_workers, on_death=on_death, home=home)
                )
            else:
                loaded[key] = load_environment(env.id, **env.args)
        except (RuntimeError, ValueError, InfraError) as error:
            raise UserError(f"environment {env.id!r} cannot be used: {error}") from error
    return loaded[key]


def _limit_time(envs: Iterable[Any], timeout_s: float) -> set[int]:
    """Give environments without a limit of their own one a little below the group's; returns which have got it.

    So a straggler ends alone, and its siblings keep their rewards; likewise one whose judge never answers.
    """
    limited = set()
    for env in envs:
        env.group_timeout_seconds = timeout_s
        if getattr(env, "timeout_seconds", 0) is None:
            env.timeout_seconds = timeout_s * STRAGGLER_SHARE
            limited.add(id(env))
    return limited


def _blame_time(states: Iterable[Any]) -> None:
    """A rollout ended by our limit has failed by that, whatever became of scoring its remains."""
    for state in states:
        if state.get("stop_condition") == "timeout_reached":
            state["error"] = RolloutTimeout("the rollout used up its share of rollout_timeout_s")
