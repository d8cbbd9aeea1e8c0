"""A pool of workers that looks like the environment inside them, to whatever runs groups.

Parts: `WorkerEnvironment`, `worker_spec`. Invariant: as with the environment itself, `run_group` and `run_rollout`
raise nothing for a rollout that failed, the death of its workers included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mettle.envs.rows import Rows
from mettle.envs.state import State, new_state
from mettle.envs.workers.endpoints import client_spec
from mettle.envs.workers.pool import WorkerPool
from mettle.envs.workers.spawn import WorkerSpec
from mettle.errors import RolloutError
from mettle.records.messages import Tool

Row = Mapping[str, Any]
CARRIED_SETTINGS = (
    "max_seq_len",
    "score_rollouts",
    "max_total_completion_tokens",
    "timeout_seconds",
    "group_timeout_seconds",
    "setup_timeout_seconds",
    "turn_timeout_seconds",
    "tool_timeout_seconds",
    "scoring_timeout_seconds",
    "cleanup_timeout_seconds",
    "max_turn_completion_tokens",
    "max_turns",
)
"""Settings that an environment may have got after it was loaded, and that its workers get too."""


def worker_spec(env: Any) -> WorkerSpec:
    """What a worker has to load to run `env`'s rollouts.

    Raises: UserError when the environment was made in code and has no id to load it by.
    """
    env_id = env.env_id if getattr(env, "env_version", None) is not None else ""
    settings = {name: getattr(env, name) for name in CARRIED_SETTINGS if hasattr(env, name)}
    return WorkerSpec(env_id, dict(env.env_args), settings)


class WorkerEnvironment:
    """Runs groups in `pool`. `client` may be anything that `client_spec` can describe, or a description."""

    has_independent_members = False
    """A group is one request to a worker."""

    def __init__(self, pool: WorkerPool, *, state_columns: Sequence[str] = ()) -> None:
        about = pool.about
        self.pool = pool
        self.state_columns = tuple(state_columns)
        self.env_id = pool.spec.env_id
        self.env_args = dict(pool.spec.env_args)
        self.env_version = about["env_version"]
        self.sampling_args: dict[str, Any] = about["sampling_args"]
        self.pass_threshold: float = about["pass_threshold"]
        self.pass_on: dict[str, float] | None = about["pass_on"]
        self.tool_defs = [Tool(**tool) for tool in about["tool_defs"]]
        self.requires_group_rollouts: bool = about["requires_group_rollouts"]
        self.provides_advantages: bool = about["provides_advantages"]
        self._timeout_seconds: float | None = about["timeout_seconds"]
        self._group_timeout_seconds: float | None = pool.spec.settings.get("group_timeout_seconds")

    @property
    def timeout_seconds(self) -> float | None:
        """The time limit of a rollout. Set it before the first group runs; afterwards by `pool.set`."""
        return self._timeout_seconds

    @timeout_seconds.setter
    def timeout_seconds(self, timeout_seconds: float | None) -> None:
        self._timeout_seconds = timeout_seconds
        self.pool.configure(timeout_seconds=timeout_seconds)

    @property
    def group_timeout_seconds(self) -> float | None:
        """As `timeout_seconds`, of a group and its scoring."""
        return self._group_timeout_seconds

    @group_timeout_seconds.setter
    def group_timeout_seconds(self, group_timeout_seconds: float | None) -> None:
        self._group_timeout_seconds = group_timeout_seconds
        self.pool.configure(group_timeout_seconds=group_timeout_seconds)

    def get_dataset(self, n: int = -1, seed: int | None = None) -> Rows:
        """Training rows, from a worker."""
        return self._rows("train", n, seed)

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> Rows:
        """Evaluation rows, from a worker."""
        return self._rows("eval", n, seed)

    def _rows(self, split: str, n: int, seed: int | None) -> Rows:
        rows = Rows(self.pool.rows(split))
        rows = rows if seed is None else rows.shuffle(seed=seed)
        return rows.take(n) if n > 0 else rows

    async def run_group(
        self,
        group_inputs: Sequence[Row],
        client: Any,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        max_retries: int = 0,
    ) -> list[State]:
        """Run and score one group in a worker."""
        return await self._run(group_inputs, client, model, sampling_args, max_retries, is_independent=False)

    async def run_rollout(
        self,
        input: Row,
        client: Any,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        max_retries: int = 0,
    ) -> State:
        """Run and score one rollout in a worker."""
        return (await self._run([input], client, model, sampling_args, max_retries, is_independent=True))[0]

    async def _run(
        self,
        rows: Sequence[Row],
        client: Any,
        model: str,
        sampling_args: Mapping[str, Any] | None,
        max_retries: int,
        *,
        is_independent: bool,
    ) -> list[State]:
        spec = client if isinstance(client, Mapping) else client_spec(client)
        try:
            states = await self.pool.run_group(
                rows,
                spec,
                model,
                sampling_args,
                max_retries=max_retries,
                is_independent=is_independent,
                columns=self.state_columns,
            )
        except RolloutError as error:
            states = [_failed(row, model, error) for row in rows]
        for state in states:
            state["client"] = client
        return states

    async def teardown(self) -> None:
        """Stop the workers; each tears its environment down."""
        await self.pool.close()


def _failed(row: Row, model: str, error: RolloutError) -> State:
    state = new_state(row, None, model, {}, [])
    state["error"] = error
    state["is_completed"], state["stop_condition"], state["completion"] = True, "has_error", []
    state["metrics"] = {}
    return state
