"""An environment over many rows: generating, evaluating, in this process or in workers, with or without a loop.

Parts: `ManyRollouts`, a base of `Environment`; `generate_in_workers`. How rows are run side by side, saved and resumed
is in `evaluation`. Invariant: whatever way it is called, one `Evaluation` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mettle.clients.factory import client_from
from mettle.envs.generating import Evaluation
from mettle.envs.loops import quiet_collector, run_sync
from mettle.envs.pacing import pacer
from mettle.envs.rows import Rows
from mettle.envs.workers.environment import WorkerEnvironment, worker_spec
from mettle.envs.workers.pool import WorkerPool


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
        """Run `inputs` (rows), grouped by `example_id`; see `Evaluation` for the options.

        With `num_workers`, in so many processes of their own, which load this environment by its id.
        """
        if num_workers:
            return await generate_in_workers(self, num_workers, inputs, client, model, sampling_args, **options)
        env: Any = self
        if env.concurrency:
            env.set_concurrency(env.concurrency)
        with quiet_collector():
            return await Evaluation(env, inputs, client, model, sampling_args, **options).run()

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
        """Run `rollouts_per_example` rollouts of each of the first `num_examples` evaluation rows."""
        env: Any = self
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
        described: dict[str, Any] = {
            "rollouts_per_example": rollouts_per_example,
            "shuffle": shuffle,
            "shuffle_seed": shuffle_seed,
        }
        return await self.generate(inputs, client, model, sampling_args, **described, **options)

    a_generate = generate

    def generate_sync(self, inputs: Any, client: Any, model: str, sampling_args: Any = None, **options: Any) -> Any:
        """`generate`, for code without an event loop."""
        return run_sync(
            self._closing(client, self.generate, inputs, model=model, sampling_args=sampling_args, **options)
        )

    def evaluate_sync(self, client: Any, model: str, sampling_args: Any = None, **options: Any) -> Any:
        """`evaluate`, for code without an event loop."""
        return run_sync(self._closing(client, self.evaluate, model=model, sampling_args=sampling_args, **options))

    async def _closing(self, client: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        resolved = client_from(client)
        try:
            return await function(*args, client=resolved, **kwargs)
        finally:
            if hasattr(resolved, "close"):
                await resolved.close()

    @staticmethod
    def make_dataset(results: Mapping[str, Any]) -> Rows:
        """The outputs of `generate` or `evaluate` as rows."""
        return Rows.from_list(results["outputs"])


async def generate_in_workers(env: Any, num_workers: int, inputs: Any, *args: Any, **options: Any) -> Any:
    """`env.generate` with its groups in worker processes."""
    async with WorkerPool(worker_spec(env), num_workers) as pool:
        remote = WorkerEnvironment(pool, state_columns=options.get("state_columns") or ())
        return await Evaluation(remote, inputs, *args, **options).run()
