"""An environment and a model as a source of rollouts, for the runner of evaluations.

Parts: `EnvironmentRollouts`, `evaluation_of` (an environment over rows, ready to run), `tasks_of`, `at_work` (the
environment here or in workers). Invariant: a rollout that fails is a record with its error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from mettle.envs.rollout_record import record_of_state
from mettle.envs.rows import Rows, format_row
from mettle.envs.workers.environment import WorkerEnvironment, worker_spec
from mettle.envs.workers.pool import WorkerPool
from mettle.evals.evaluation import Evaluation, Subject
from mettle.evals.options import EvalOptions
from mettle.evals.output import task_key_of
from mettle.evals.runner import EvalTask
from mettle.evals.source import GroupRequest
from mettle.processes.collector import quiet_collector
from mettle.records.tasks import RolloutRecord

Row = Mapping[str, Any]


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
            for row in rows:  # No comprehension: that would be one more frame between the runner and the model.
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
    """An environment (or workers that have it) over rows, or a dict of their columns, ready to run."""
    rows = _rows_of_columns(env, inputs) if isinstance(inputs, Mapping) else _rows_of(inputs)
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
        pass_on=env.pass_on,
        tools=[dict(tool) for tool in env.tool_defs] or None,
        version_info=_version_info(env),
        is_split=is_split,
        is_scored_together=env.requires_group_rollouts,
        title=env.env_id or type(env).__name__,
    )
    return Evaluation(source, tasks_of(rows), rows, subject, options)


def _rows_of(inputs: Any) -> list[Row]:
    return list(inputs.to_list() if hasattr(inputs, "to_list") else inputs)


def _rows_of_columns(env: Any, columns: Mapping[str, Any]) -> list[Row]:
    """Rows as verifiers took them before 0.1.8: each a task of its own, a question under the environment's prompt."""
    instructions = (None, None) if "prompt" in columns else (env.system_prompt, env.few_shot)
    return [format_row(dict(row), index, *instructions) for index, row in enumerate(Rows.from_dict(columns).to_list())]


def tasks_of(rows: Sequence[Row]) -> list[EvalTask]:
    """Rows as tasks: those of one `example_id` are rollouts of one task."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.get("example_id", 0), []).append(row)
    return [EvalTask(example, task_key_of(found[0]), len(found), tuple(found)) for example, found in groups.items()]


@asynccontextmanager
async def at_work(env: Any, num_workers: int, options: EvalOptions) -> AsyncIterator[Any]:
    """The environment itself, or as many processes that have it; the process is arranged for many rollouts."""
    with quiet_collector():
        if not num_workers:
            if env.concurrency:
                env.set_concurrency(env.concurrency)
            yield env
            return
        async with WorkerPool(worker_spec(env), num_workers) as pool:
            yield WorkerEnvironment(pool, state_columns=options.state_columns or ())


def _base_url(client: Any) -> str:
    return str(getattr(client, "base_url", "") or getattr(getattr(client, "transport", None), "base_url", ""))


def _version_info(env: Any) -> dict[str, Any]:
    from mettle import __version__

    version = getattr(env, "env_version", None)
    return {"vf_version": __version__, "vf_commit": None, "env_version": version, "env_commit": None}
