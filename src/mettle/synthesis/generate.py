"""Running the rollouts of a set: many of each training row, kept as they end, taken up again after a kill.

Parts: `GenerateSpec`, `generate_rollouts`, `training_rows`, `build`. The rollouts are an evaluation's results, in the
set's own folder, so that what resuming promises for evaluations holds here. Invariant: evaluation rows never become
training data, unless the environment has no others or they are asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mettle.envs.prepared import Prepared
from mettle.errors import UserError
from mettle.evals.reader import EvaluationReader
from mettle.evals.slots import Slots
from mettle.synthesis.dataset import Written, source_of, write_dataset
from mettle.synthesis.selection import Rules, select

Split = Literal["train", "eval"]
ROLLOUTS = "rollouts"


@dataclass(frozen=True, slots=True)
class Task:
    """What a set is made of: rollouts of `num_tasks` rows (-1 for all) in the order of `seed`."""

    num_tasks: int
    rollouts_per_task: int
    split: Split = "train"
    seed: int = 0


def training_rows(env: Any, task: Task) -> list[dict[str, Any]]:
    """The rows of the split that is asked for.

    Raises: UserError when the environment has none.
    """
    rows = getattr(env, "dataset" if task.split == "train" else "eval_dataset", None)
    if rows is None or not len(rows):
        other = "eval" if task.split == "train" else "train"
        raise UserError(f"{env.env_id} has no {task.split} rows; ask for --split {other}")
    found = rows.to_list() if hasattr(rows, "to_list") else list(rows)
    random.Random(task.seed).shuffle(found)
    return found if task.num_tasks < 0 else found[: task.num_tasks]


async def generate_rollouts(prepared: Prepared, task: Task, folder: Path, on_kept: Callable[..., None]) -> Any:
    """Run what is missing of the rollouts in `folder`; the evaluation's results, without its rows.

    Raises: UserError when `folder` holds rollouts of something else.
    """
    spec, target, tally = prepared.spec, prepared.target, prepared.tally
    rows = training_rows(prepared.env, task)
    try:
        return await prepared.env.generate(
            [row for row in rows for _ in range(task.rollouts_per_task)],
            prepared.client,
            target.model,
            spec.sampling_args,
            rollouts_per_example=task.rollouts_per_task,
            shuffle=True,
            shuffle_seed=task.seed,
            max_concurrent=spec.max_concurrent,
            slots=Slots(spec.max_concurrent),
            max_retries=spec.max_retries,
            results_path=folder / ROLLOUTS,
            keep_outputs=False,
            price=target.price,
            state_columns=spec.state_columns,
            extra_metadata={"launch": spec.to_dict(), "split": task.split},
            on_kept=on_kept,
            on_rollout=tally.add,
        )
    finally:
        tally.finish()
        await prepared.client.close()
        await prepared.env.teardown()


def build(
    results: Path, folder: Path, min_reward: float | None, rules: Callable[[float], Rules], formats: Sequence[str]
) -> Written:
    """Make the set in `folder` of the rollouts in `results`; without `min_reward`, what passes is what passed there.

    Raises: UserError when there are no results, or nothing of them is kept.
    """
    reader = EvaluationReader(results)
    chosen = rules(reader.pass_threshold if min_reward is None else min_reward)
    return write_dataset(folder, select(reader.rows(), chosen), source_of(reader.metadata), chosen, formats)
