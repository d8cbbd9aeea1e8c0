"""An environment over many rows: generating, evaluating, in this process or in workers, with or without a loop.

Parts: `ManyRollouts`, a base of `Environment`. How rows are run side by side, kept and resumed is in `mettle.evals`.
Invariants: whatever way it is called, one `Evaluation` does the work; what evaluations need (numpy, a database) is
imported when one begins, because an environment alone, in a worker or under a trainer, does not need it.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from mettle.clients.factory import client_from
from mettle.envs.loops import run_sync
from mettle.envs.pacing import pacer
from mettle.envs.rows import Rows

T = TypeVar("T")

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
        from mettle.envs.environment_rollouts import at_work, evaluation_of
        from mettle.evals.options import options_from

        chosen = options_from(options, "generate", GENERATE_ARGUMENTS)
        async with at_work(self, num_workers, chosen) as working:
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
        from mettle.envs.environment_rollouts import at_work, evaluation_of
        from mettle.evals.options import options_from

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
        async with at_work(env, num_workers, chosen) as working:
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


async def _closing(client: Any, work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    finally:
        if hasattr(client, "close"):
            await client.close()
