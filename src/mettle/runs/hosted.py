"""Shared fields fan out to the components, and the flat schema of hosted training is read as it stands.

Pure functions on a parsed TOML tree. A field set both at the top and in a component must agree.
"""

from __future__ import annotations

import copy
from typing import Any

SHARED: dict[str, tuple[str, ...]] = {
    "max_steps": ("orchestrator.max_steps", "trainer.max_steps"),
    "seed": ("orchestrator.seed", "trainer.seed", "inference.seed", "warm_up.sft.seed"),
    "batch_size": ("orchestrator.batch_size",),
    "rollouts_per_example": ("orchestrator.group_size",),
    "learning_rate": ("trainer.optim.lr",),
    "max_async_level": ("orchestrator.max_lag",),
    "env": ("orchestrator.envs",),
    "sampling": ("orchestrator.sampling",),
    "eval": ("orchestrator.eval",),
    "val": ("orchestrator.eval",),
    "wandb": ("tracking.wandb",),
    "lora_rank": ("model.lora.rank",),
    "lora_alpha": ("model.lora.alpha",),
    "model.lora": ("trainer.lora",),
}
"""Where each shared field goes, in this order: what one fills in may be shared on."""

SHARED_DEFAULTS: dict[str, Any] = {"max_steps": 100, "seed": 0}
"""Shared fields that every component needs, and what they are when nobody says."""

REFUSED = {
    "buffer": "[orchestrator.curriculum] chooses tasks and filters groups here",
    "oversampling_factor": "groups without a signal are replaced here, as far as orchestrator.max_backfill goes",
    "trajectory_strategy": "what a rollout has branched into is found by token identity here",
}
"""Hosted fields that would change the result and have no counterpart; what there is in their place."""


def fan_out(tree: dict[str, Any]) -> dict[str, Any]:
    """A copy of `tree` in which every shared field stands in its components.

    Raises: ValueError when a component says something else than the shared field, or for a field of `REFUSED`.
    """
    for name, instead in REFUSED.items():
        if tree.get(name) is not None:
            raise ValueError(f"{name} is not offered, and would change the result: take it out; {instead}")
    result = copy.deepcopy(tree)
    if isinstance(result.get("model"), str):
        result["model"] = {"path": result["model"]}
    for name, default in SHARED_DEFAULTS.items():
        result.setdefault(name, _said_below(result, SHARED[name], default))
    for name, targets in SHARED.items():
        value = _said_below(result, (name,), None)
        if value is None:
            continue
        for target in targets:
            _place(result, target, value, name)
    return result


def _said_below(tree: dict[str, Any], targets: tuple[str, ...], default: Any) -> Any:
    """What the first component that says something says, so that setting it there alone is enough."""
    for target in targets:
        table: Any = tree
        for key in target.split("."):
            table = table.get(key) if isinstance(table, dict) else None
        if table is not None:
            return table
    return default


def _place(tree: dict[str, Any], target: str, value: Any, name: str) -> None:
    *folders, leaf = target.split(".")
    table = tree
    for folder in folders:
        inner = table.setdefault(folder, {})
        if not isinstance(inner, dict):
            return  # Already a parsed model or a mistake that validation will name.
        table = inner
    if leaf not in table:
        table[leaf] = copy.deepcopy(value)
    elif not _includes(table[leaf], value):
        raise ValueError(f"{target} = {table[leaf]!r} contradicts the shared {name} = {value!r}; set one of the two")


def _includes(full: Any, said: Any) -> bool:
    """Whether `full` says all that was said and perhaps more: a resolved table has every default beside it."""
    if isinstance(full, dict) and isinstance(said, dict):
        return all(key in full and _includes(full[key], value) for key, value in said.items())
    if isinstance(full, list) and isinstance(said, list):
        return len(full) == len(said) and all(map(_includes, full, said))
    return bool(full == said)
