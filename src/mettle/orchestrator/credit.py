"""What algorithms say of tokens: checked, spread over the tokens, and weighed for a signal. Pure functions.

An algorithm says something of a rollout by column (`records.tokens.CREDIT_COLUMNS`), in whichever grain suits it:

- a number: every sampled token of the rollout;
- a list with one entry a turn, each a number (that turn's sampled tokens) or an array (of a wide column always an array
  [tokens, k]). An array ends with its turn: as long as the turn's completion it covers the sampled tokens, longer ones
  reach back into what the turn adds to the prompt, so that what the policy was told can be trained too.

Sampled tokens that have an advantage and no `rl_weights` get the weight 1. Parts: `per_rollout`, `rewards_of`,
`are_equal`, `mean_and_deviation`, `label_of` (for writing algorithms), `checked`, `has_signal`, `is_imitated`,
`largest_advantage`, `mean_advantage`, `wide_columns`, `fill_columns`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mettle.evals.estimator import mean_of
from mettle.records.tasks import Credit, CreditValue, GroupRecord, RolloutRecord, Turn
from mettle.records.tokens import COLUMNS, CREDIT_COLUMNS, WIDE_COLUMNS, FloatArray

IMITATING = ("ce_weights", "ref_kl_weights", "distill_weights")
"""Weights that are a signal by themselves, without an advantage."""
COMPARED_WITH = {
    "ref_kl_weights": "ref_logprobs", "teacher_ids": "teacher_logprobs", "teacher_logprobs": "teacher_ids"
}  # fmt: skip
"""Columns that say nothing without another."""
EQUAL_WITHIN = 1e-6
"""Rewards that agree to within this are equal: float noise must not become a gradient."""


def rewards_of(group: GroupRecord) -> list[float | None]:
    """The reward of each rollout, None for one that failed."""
    return [rollout.reward for rollout in group.rollouts]


def per_rollout(advantages: Iterable[float | None]) -> list[Credit | None]:
    """One advantage for all sampled tokens of each rollout; None for one that does not train."""
    return [None if advantage is None else {"advantages": advantage} for advantage in advantages]


def are_equal(rewards: Sequence[float]) -> bool:
    """True when the rewards agree to within `EQUAL_WITHIN`, or there are none."""
    return not rewards or max(rewards) - min(rewards) <= EQUAL_WITHIN


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation of at least one value, the latter as of the whole population."""
    mean = mean_of(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def label_of(rollout: RolloutRecord, key: str) -> str:
    """What a rollout's `info` says of itself under `key`; empty where it says nothing."""
    value = rollout.info.get(key) if isinstance(rollout.info, Mapping) else None
    return "" if value is None else str(value)


def checked(credits: Sequence[Credit | None], group: GroupRecord) -> list[Credit | None]:
    """The same in plain numbers and float32 arrays; a rollout without a reward trains nothing, whatever was said of it.

    Raises: ValueError for an unknown column, one that says nothing without another that is not there, or values that do
    not fit the rollouts and their turns.
    """
    if len(credits) != len(group.rollouts):
        raise ValueError(f"credit for {len(credits)} rollouts, but the group has {len(group.rollouts)}")
    return [
        None if credit is None or rollout.reward is None else _checked(credit, rollout)
        for credit, rollout in zip(credits, group.rollouts, strict=True)
    ]


def _checked(credit: Credit, rollout: RolloutRecord) -> Credit:
    unknown = sorted(credit.keys() - set(CREDIT_COLUMNS))
    if unknown:
        raise ValueError(f"there is no column {unknown[0]!r}; there are {', '.join(CREDIT_COLUMNS)}")
    for name, needed in COMPARED_WITH.items():
        if name in credit and needed not in credit:
            raise ValueError(
                f"{name} without {needed}: there is nothing to compare its tokens with, so none would train"
            )
    return {name: _checked_value(name, value, rollout) for name, value in credit.items()}


def _checked_value(name: str, value: CreditValue, rollout: RolloutRecord) -> CreditValue:
    is_wide = name in WIDE_COLUMNS
    if _is_number(value) and not is_wide:
        return _finite(name, value)
    entries: list[Any] = list(value) if isinstance(value, Iterable) else []
    if len(entries) != len(rollout.turns):
        raise ValueError(f"{name} is one number, or a list of one entry for each of the {len(rollout.turns)} turns")
    found: list[float | FloatArray] = []
    for entry, turn in zip(entries, rollout.turns, strict=True):
        if _is_number(entry) and not is_wide:
            found.append(_finite(name, entry))
            continue
        array = np.asarray(entry, np.float32)
        longest = len(turn.new_prompt_ids) + len(turn.completion_ids)
        if array.ndim != 1 + is_wide or not len(turn.completion_ids) <= len(array) <= longest:
            raise ValueError(
                f"{name} of a turn has shape {array.shape}; it has {len(turn.completion_ids)} sampled tokens "
                f"and adds {longest} in all"
            )
        found.append(array)
    return tuple(found)


def has_signal(credit: Credit, rollout: RolloutRecord) -> bool:
    """True when some token has an advantage other than 0, or is to be imitated or pulled towards a reference."""
    if is_imitated(credit):
        return True
    advantages, weights = credit.get("advantages", 0.0), credit.get("rl_weights", 1.0)
    if isinstance(advantages, float) and isinstance(weights, float):
        return advantages * weights != 0.0
    return any(
        np.any(_sampled(advantages, index, turn) * _sampled(weights, index, turn))
        for index, turn in enumerate(rollout.turns)
    )


def is_imitated(credit: Credit) -> bool:
    """True when some token is to be imitated, or pulled towards a reference or a teacher."""
    return any(_any(credit.get(name, 0.0)) for name in IMITATING)


def largest_advantage(credit: Credit, rollout: RolloutRecord) -> float:
    """The largest advantage of a sampled token, either way."""
    advantages = credit.get("advantages", 0.0)
    if isinstance(advantages, float):
        return abs(advantages)
    sampled = [_sampled(advantages, index, turn) for index, turn in enumerate(rollout.turns)]
    return max((float(np.abs(values).max()) for values in sampled if len(values)), default=0.0)


def mean_advantage(credit: Credit, rollout: RolloutRecord) -> float | None:
    """The mean over the sampled tokens, for whoever looks at the rollout; None when the credit has no advantages."""
    advantages = credit.get("advantages")
    if advantages is None or isinstance(advantages, float):
        return advantages
    sampled = [_sampled(advantages, index, turn) for index, turn in enumerate(rollout.turns)]
    total = float(sum(np.sum(values, dtype=np.float64) for values in sampled))
    return total / max(1, rollout.num_completion_tokens)


def wide_columns(credit: Credit, length: int) -> dict[str, NDArray[Any]]:
    """Room for the wide columns that `credit` fills, each [length, k] of its fill value."""
    found = {}
    for name in WIDE_COLUMNS:
        value = credit.get(name)
        if value is not None and not isinstance(value, float):
            width = max((np.shape(entry)[1] for entry in value), default=0)
            found[name] = np.full((length, width), COLUMNS[name].fill, COLUMNS[name].dtype)
    return found


def fill_columns(columns: Mapping[str, FloatArray], credit: Credit, index: int, turn: Turn, place: slice) -> None:
    """Write what `credit` says of turn `index` into `columns`, in which `place` is its completion (maybe cut short)."""
    length = place.stop
    for name, value in credit.items():
        entry: Any = value if isinstance(value, float) else value[index]
        if isinstance(entry, float):
            columns[name][place] = entry
        else:
            begin = place.start + len(turn.completion_ids) - len(entry)
            width = entry.shape[1:]  # of a wide column its k
            columns[name][(slice(begin, length), *map(slice, width))] = entry[: length - begin]
    if "advantages" in credit and "rl_weights" not in credit:
        columns["rl_weights"][place] = 1.0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number)


def _finite(name: str, value: Any) -> float:
    if not np.isfinite(value):
        raise ValueError(f"{name} is {value}")
    return float(value)


def _any(value: CreditValue) -> bool:
    return value != 0.0 if isinstance(value, float) else any(np.any(entry) for entry in value)


def _sampled(value: CreditValue, index: int, turn: Turn) -> FloatArray:
    """What a value says of the sampled tokens of turn `index`."""
    entry: Any = value if isinstance(value, float) else value[index]
    number = len(turn.completion_ids)
    return np.full(number, entry, np.float32) if isinstance(entry, float) else entry[len(entry) - number :]
