"""An environment over many rows: generating, evaluating, in this process or in workers, with or without a loop.

Parts: `ManyRollouts`, a base of `Environment`; `EnvironmentRollouts`, an environment with a model as a source of
rollouts. How rows are run side by side, kept and resumed is in `mettle.evals`. Invariant: whatever way it is called,
one `Evaluation` does the work.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from mettle.clients.factory import client_from
from mettle.envs.loops import quiet_collector, run_sync
from mettle.envs.pacing import pacer
from mettle.envs.rollout_record import record_of_state
from mettle.envs.rows import Rows
from mettle.envs.workers.environment import WorkerEnvironment, worker_spec
from mettle.envs.workers.pool import WorkerPool
from mettle.evals.evaluation import Evaluation, Subject
from mettle.evals.options import EvalOptions, options_from
from mettle.evals.output import task_key_of
from mettle.evals.runner import EvalTask
from mettle.evals.source import GroupRequest
from mettle.records.tasks import RolloutRecord

T = TypeVar("T")
Row = Mapping[str, Any]

GENERATE_ARGUMENTS = ("inputs", "client", "model", "sampling_args", "num_workers")
EVALUATE_ARGUMENTS = (*GENERATE_ARGUMENTS[1:], "num_examples", "rollouts_per_example", "shuffle", "shuffle_seed")


class ManyRollouts:
    """What an `Environment` does with many rows."""

    async def generate(
        self,
        inputs: Any,
        client: Any,
        model: str,
        sampling_args: Any = None,
        *,
        num_workers: int = 0,
        **options: Any,
    ) -> Any:
        """Run `inputs` (rows), grouped by `example_id`; `options` are those of `mettle.evals.options.EvalOptions`.

        With `num_workers`, in so many processes of their own, which load this environment by its id.
        Raises: UnknownArgument (a UserError and a TypeError) for an option that nobody knows.
        """
        chosen = options_from(options, "generate", GENERATE_ARGUMENTS)
        async with _at_work(self, num_workers, chosen) as working:
            return await evaluation_of(working, inputs, client_from(client), model, sampling_args, chosen).run()

    async def evaluate(
        self,
        client: Any,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        num_examples: int = -1,
        rollouts_per_example: int = 1,
        shuffle: bool = False,
        shuffle_seed: int | None = None,
        **options: Any,
    ) -> Any:
        """Run `rollouts_per_example` rollouts of each of the first `num_examples` evaluation rows.

        Raises: as `generate` does.
        """
        env: Any = self
        described: dict[str, Any] = {
            "rollouts_per_example": rollouts_per_example,
            "shuffle": shuffle,
            "shuffle_seed": shuffle_seed,
        }
        num_workers = options.pop("num_workers", 0)
        workers = {"num_workers": num_workers} if num_workers else {}
        options_from(options, "evaluate", EVALUATE_ARGUMENTS)
        rows: Rows = env.get_eval_dataset()
        if shuffle:
            rows = rows.shuffle(seed=shuffle_seed)
        if num_examples > 0:
            rows = rows.take(num_examples)
        inputs: list[dict[str, Any]] = []
        pace = pacer()
        for row in rows:
            inputs += [row] * rollouts_per_example
            if pace.is_spent:
                await pace.turn()
        if type(self).generate is not ManyRollouts.generate:  # An author's own has its way.
            return await self.generate(inputs, client, model, sampling_args, **described, **workers, **options)
        chosen = options_from({**described, **options}, "evaluate")
        async with _at_work(env, num_workers, chosen) as working:
            return await evaluation_of(working, inputs, client_from(client), model, sampling_args, chosen).run()

    a_generate = generate

    def generate_sync(self, inputs: Any, client: Any, model: str, sampling_args: Any = None, **options: Any) -> Any:
        """`generate`, for code without an event loop."""
        client = client_from(client)
        return run_sync(_closing(client, self.generate(inputs, client, model, sampling_args, **options)))

    def evaluate_sync(self, client: Any, model: str, sampling_args: Any = None, **options: Any) -> Any:
        """`evaluate`, for code without an event loop."""
        client = client_from(client)
        return run_sync(_closing(client, self.evaluate(client, model, sampling_args, **options)))

    @staticmethod
    def make_dataset(results: Mapping[str, Any]) -> Rows:
        """The outputs of `generate` or `evaluate` as rows."""
        return Rows.from_list(results["outputs"])


class EnvironmentRollouts:
    """An environment and a model as a source of rollouts. `is_split`: each rollout is run and scored by itself."""

    def __init__(
        self,
        env: Any,
        client: Any,
        model: str,
        sampling_args: Mapping[str, Any],
        *,
        is_split: bool,
        max_retries: int = 0,
        columns: Sequence[str] = (),
    ) -> None:
        self._env, self._client, self._model, self._sampling_args = env, client, model, sampling_args
        self._is_split = is_split
        self._max_retries = max_retries
        self._columns = columns
        self._has_advantages = bool(getattr(env, "provides_advantages", False))

    async def run_group(self, request: GroupRequest) -> tuple[RolloutRecord, ...]:
        """Roll out `request.rows`. A rollout that fails is a record with its error."""
        rows, retries = request.rows, self._max_retries
        if self._is_split:
            states = []
            for row in rows:
                states.append(
                    await self._env.run_rollout(
                        row, self._client, self._model, self._sampling_args, max_retries=retries
                    )
                )
        else:
            states = await self._env.run_group(
                list(rows), self._client, self._model, self._sampling_args, max_retries=retries
            )
        return tuple(
            record_of_state(
                state,
                rollout_id,
                uid=request.uid if row is rows[0] else task_key_of(row),
                position=position,
                columns=self._columns,
                has_advantages=self._has_advantages,
            )
            for state, row, (rollout_id, position) in zip(states, rows, request.rollouts, strict=True)
        )


def evaluation_of(
    env: Any, inputs: Any, client: Any, model: str, sampling_args: Mapping[str, Any] | None, options: EvalOptions
) -> Evaluation:
    """An environment (or workers that have it) over rows, ready to run."""
    rows: list[Row] = list(inputs.to_list() if hasattr(inputs, "to_list") else inputs)
    arguments = {**env.sampling_args, **(sampling_args or {})}
    # Rollouts of a group need nothing of each other when neither scores nor a shared request tie them together.
    is_split = options.independent_scoring or (env.has_independent_members and not hasattr(client, "for_group"))
    source = EnvironmentRollouts(
        env, client, model, arguments,
        is_split=is_split, max_retries=options.max_retries, columns=tuple(options.state_columns or ()),
    )  # fmt: skip
    subject = Subject(
        env_id=env.env_id,
        model=model,
        env_args=env.env_args,
        base_url=_base_url(client),
        sampling_args=arguments,
        pass_threshold=env.pass_threshold,
        tools=[dict(tool) for tool in env.tool_defs] or None,
        version_info=_version_info(env),
        is_split=is_split,
        is_scored_together=env.requires_group_rollouts,
        title=env.env_id or type(env).__name__,
    )
    return Evaluation(source, tasks_of(rows), rows, subject, options)


def tasks_of(rows: Sequence[Row]) -> list[EvalTask]:
    """Rows as tasks: those of one `example_id` are rollouts of one task."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.get("example_id", 0), []).append(row)
    return [EvalTask(example, task_key_of(found[0]), len(found), tuple(found)) for example, found in groups.items()]


@asynccontextmanager
async def _at_work(env: Any, num_workers: int, options: EvalOptions) -> AsyncIterator[Any]:
    """The environment itself, or as many processes that have it; the process is arranged for many rollouts."""
    with quiet_collector():
        if not num_workers:
            if env.concurrency:
                env.set_concurrency(env.concurrency)
            yield env
            return
        async with WorkerPool(worker_spec(env), num_workers) as pool:
            yield WorkerEnvironment(pool, state_columns=options.state_columns or ())


async def _closing(client: Any, work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    finally:
        if hasattr(client, "close"):
            await client.close()


def _base_url(client: Any) -> str:
    return str(getattr(client, "base_url", "") or getattr(getattr(client, "transport", None), "base_url", ""))


def _version_info(env: Any) -> dict[str, Any]:
    from mettle import __version__

    version = getattr(env, "env_version", None)
    return {"vf_version": __version__, "vf_commit": None, "env_version": version, "env_commit": None}
