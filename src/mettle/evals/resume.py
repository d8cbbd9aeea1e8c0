"""Going on with an evaluation: what of it is kept, and what must be run (again).

Parts: `check_same` (refuses another evaluation's folder), `kept_rollouts`. A rollout counts as done when it has a
reward and no error. Invariant: nothing is kept from another model, other settings or another task.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mettle.errors import UserError
from mettle.evals.runner import EvalTask, example_key
from mettle.records.tasks import RolloutRecord

SAME = ("env_id", "model", "rollouts_per_example", "shuffle", "shuffle_seed")
SAME_IF_SAVED = ("env_args", "sampling_args")
NO_SAMPLING: Mapping[str, Any] = {"n": 1, "extra_body": {}}
"""Sampling arguments that every environment has, and that say nothing."""


def kept_rollouts(
    path: Path, records: Sequence[RolloutRecord], tasks: Iterable[EvalTask], *, is_whole_groups: bool
) -> list[RolloutRecord]:
    """Which finished rollouts need not be run again.

    With `is_whole_groups`, rollouts that are scored together are kept or repeated together.
    Raises: UserError when the dataset has changed under the evaluation.
    """
    wanted = {example_key(task.example_id): task for task in tasks}
    changed = []
    kept = []
    counts: dict[str, int] = {}
    for record in records:
        key = example_key(record.example_id)
        task = wanted.get(key)
        if task is None or (record.uid and task.uid and record.uid != task.uid):
            changed.append(record.example_id)
        elif (record.position or 0) < task.num_rollouts:
            counts[key] = counts.get(key, 0) + 1
            kept.append(record)
    if changed:
        raise UserError(_changed(path, changed))
    if is_whole_groups:
        whole = {key for key, count in counts.items() if count == wanted[key].num_rollouts}
        kept = [record for record in kept if example_key(record.example_id) in whole]
    return kept


def check_same(path: Path, saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Refuse to go on with something else; an evaluation may grow by more examples.

    Raises: UserError, one line.
    """
    for name in SAME:
        if name in saved and saved[name] != mine[name]:
            raise UserError(_other(path, name, saved[name], mine[name]))
    if (saved.get("num_examples") or 0) > mine["num_examples"]:
        raise UserError(_other(path, "num_examples", saved["num_examples"], mine["num_examples"]))
    for name in SAME_IF_SAVED:
        if saved.get(name) is None:
            continue
        before, now = (settings_of(values[name]) for values in (saved, mine))
        if before != now:
            key = next(key for key in (*before, *now) if before.get(key) != now.get(key))
            raise UserError(_other(path, f"{name}.{key}", before.get(key), now.get(key)))


def settings_of(values: Any) -> dict[str, Any]:
    """Settings as they are compared: as JSON writes them, without those that mean nothing."""
    plain = json.loads(json.dumps(values, default=str))
    if not isinstance(plain, dict):
        return {}
    return {k: v for k, v in plain.items() if v is not None and not (k in NO_SAMPLING and NO_SAMPLING[k] == v)}


def _other(path: Path, name: str, saved: Any, mine: Any) -> str:
    return (
        f"cannot resume from {path}: its {name} is {saved!r}, this evaluation's is {mine!r}; "
        "give the same, or another results path"
    )


def _changed(path: Path, examples: Sequence[Any]) -> str:
    shown = ", ".join(map(str, examples[:3])) + (", ..." if len(examples) > 3 else "")
    return (
        f"cannot resume from {path}: the dataset has changed since ({len(examples)} finished rollouts "
        f"are of other tasks than examples {shown} now); start a new evaluation"
    )
