"""Running the rollouts of a set: many of each training row, kept as they end, taken up again after a kill.

Parts: `generate_rollouts`, `training_rows`, `build`. The rollouts are an evaluation's results, in the
set's own folder, so that what resuming promises for evaluations holds here. Invariant: evaluation rows never become
training data, unless the environment has no others or they are asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mettle.envs.prepared import Prepared
from mettle.errors import UserError
from mettle.evals.passing import PassRule
from mettle.evals.reader import EvaluationReader
from mettle.evals.slots import Slots
from mettle.synthesis.config import GenerateSpec
from mettle.synthesis.dataset import Written, source_of, write_dataset
from mettle.synthesis.selection import select

ROLLOUTS = "rollouts"


def training_rows(env: Any, wanted: GenerateSpec) -> list[dict[str, Any]]:
    """The rows of the split that is asked for.

    Raises: UserError when the environment has none.
    """
    rows = getattr(env, "dataset" if wanted.split == "train" else "eval_dataset", None)
    if rows is None or not len(rows):
        other = "eval" if wanted.split == "train" else "train"
        raise UserError(f"{env.env_id} has no {wanted.split} rows; ask for --split {other}")
    found = rows.to_list() if hasattr(rows, "to_list") else list(rows)
    random.Random(wanted.seed).shuffle(found)
    return found if wanted.num_tasks < 0 else found[: wanted.num_tasks]


async def generate_rollouts(prepared: Prepared, wanted: GenerateSpec, on_kept: Callable[..., None]) -> Any:
    """Run what is missing of the rollouts in the set's folder; the evaluation's results, without its rows.

    Raises: UserError when the folder holds rollouts of something else.
    """
    spec, target, tally = prepared.spec, prepared.target, prepared.tally
    rows = training_rows(prepared.env, wanted)
    try:
        return await prepared.env.generate(
            [row for row in rows for _ in range(wanted.rollouts)],
            prepared.client,
            target.model,
            spec.sampling_args,
            rollouts_per_example=wanted.rollouts,
            shuffle=True,
            shuffle_seed=wanted.seed,
            max_concurrent=spec.max_concurrent,
            slots=Slots(spec.max_concurrent),
            max_retries=spec.max_retries,
            results_path=wanted.folder / ROLLOUTS,
            keep_outputs=False,
            price=target.price,
            state_columns=spec.state_columns,
            kind="data",
            extra_metadata={"launch": spec.to_dict(), "split": wanted.split},
            on_kept=on_kept,
            on_rollout=tally.add,
        )
    finally:
        tally.finish()
        await prepared.client.close()
        await prepared.env.teardown()


def build(wanted: GenerateSpec) -> Written:
    """Make the set of the rollouts that are there; without `min_reward`, what passes is what passed there.

    Raises: UserError when there are no results, or nothing of them is kept.
    """
    reader = EvaluationReader(Path(wanted.results) if wanted.results is not None else wanted.folder / ROLLOUTS)
    rule = reader.pass_rule if wanted.min_reward is None else PassRule(wanted.min_reward)
    rules = wanted.model_copy(update={"min_reward": rule.threshold})
    kept = select(reader.rows(), rules, rule)
    return write_dataset(wanted.folder, kept, source_of(reader.metadata), rules, wanted.formats)
