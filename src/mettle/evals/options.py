"""The keyword arguments of `evaluate` and `generate`, declared once.

Parts: `EvalOptions`, `options_from`. Invariant: an argument that nobody knows is an error that names the nearest one;
those of v0 releases that mean nothing any more are accepted.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mettle.clients.prices import Price
from mettle.errors import UserError
from mettle.evals.facts import RolloutFacts
from mettle.evals.slots import Slots

WITHOUT_EFFECT = frozenset({
    "push_to_hf_hub", "hf_hub_dataset_name", "save_every", "use_tqdm", "interleave_scoring", "score_rollouts",
    "max_concurrent_generation", "max_concurrent_scoring", "path_to_save", "verbose",
})  # fmt: skip
"""Arguments of v0 releases that change nothing here."""


class UnknownArgument(UserError, TypeError):
    """A keyword argument that nobody knows."""


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """How rollouts are run, kept and told of.

    `max_concurrent` bounds groups, or rollouts with `independent_scoring`; -1: no bound. `slots` bounds rollouts, over
    every evaluation that shares it. `extra_metadata` are top-level keys of the caller's. Without `keep_outputs` the
    rows are only on disk, and `outputs` stays empty. `on_kept` is told how many rollouts there are and which were taken
    over, `on_rollout` of each that ends, the callbacks of verifiers (`on_start`, `on_progress`, `on_log`) of each
    group. `kind` is what the store calls the evaluation.
    """

    max_concurrent: int = -1
    results_path: str | Path | None = None
    state_columns: Sequence[str] | None = None
    save_results: bool = False
    independent_scoring: bool = False
    max_retries: int = 0
    rollouts_per_example: int | None = None
    shuffle: bool = False
    shuffle_seed: int | None = None
    slots: Slots | None = None
    price: Price | None = None
    keep_outputs: bool = True
    extra_metadata: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "eval"
    on_start: Callable[..., Any] | None = None
    on_kept: Callable[[int, list[RolloutFacts]], Any] | None = None
    on_progress: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None
    on_rollout: Callable[[RolloutFacts], Any] | None = None
    on_log: Callable[[str], Any] | None = None


def options_from(given: Mapping[str, Any], function: str, others: Sequence[str] = ()) -> EvalOptions:
    """The options among `given`; `others` are further arguments of `function`, named where one is misspelt.

    Raises: UnknownArgument.
    """
    known = [entry.name for entry in fields(EvalOptions)]
    for name in given:
        if name not in known and name not in WITHOUT_EFFECT:
            near = difflib.get_close_matches(name, [*others, *known], n=1, cutoff=0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join([*others, *known])}"
            raise UnknownArgument(f"{function}() has no argument {name!r}; {hint}")
    return EvalOptions(**{name: value for name, value in given.items() if name in known})
