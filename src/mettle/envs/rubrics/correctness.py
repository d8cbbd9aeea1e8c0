"""Which part of a reward says that the answer is right: what an evaluation holds against its pass threshold.

Parts: `correctness_weights`; `joined`, those of a group of environments. A person may name the metrics
(`pass_on="correct"`); otherwise it is the reward without its format functions, those with `format` in their name.
Invariant: None where it is the reward itself, as verifiers has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mettle.envs.rubrics.rubric import scores_groups_itself
from mettle.errors import UserError

FORMAT = "format"


def correctness_weights(rubric: Any, pass_on: str | Sequence[str] | None = None) -> dict[str, float] | None:
    """Weights of the metrics whose sum is the correctness reward; None where that is the reward.

    What is named in `pass_on` is averaged by its weights. Without names, weights that come to less than 1 are scaled up
    to it, so that a right answer can reach a threshold that is a share of 1.
    Raises: UserError when there is no metric of that name.
    """
    weights = _weights(rubric)
    if pass_on is None:
        return _without_format(weights) if weights is not None and not _is_its_own(rubric) else None
    names = [pass_on] if isinstance(pass_on, str) else list(pass_on)
    known = dict.fromkeys(rubric.get_reward_func_names())
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        said = f"names {unknown[0]!r}, which is no metric" if unknown else "names no metric"
        raise UserError(f"pass_on {said} of this environment; there are {', '.join(known) or 'none'}")
    chosen = {name: (weights or {}).get(name, 0.0) for name in names}
    total = sum(chosen.values())
    if total <= 0.0:
        return dict.fromkeys(names, 1.0 / len(names))
    return {name: weight / total for name, weight in chosen.items()}


def joined(rules: Sequence[Mapping[str, float] | None], rubrics: Sequence[Any]) -> dict[str, float] | None:
    """The rules of several environments as one, each of whose rollouts has 0 in the others' metrics.

    None when all go by the reward, or when two give one name different weights.
    """
    if not any(rules):
        return None
    found: dict[str, float] = {}
    for rule, rubric in zip(rules, rubrics, strict=True):
        own = rule or _weights(rubric)
        if own is None or any(found.get(name, weight) != weight for name, weight in own.items()):
            return None
        found.update({name: weight for name, weight in own.items() if weight})
    return found


def _is_its_own(rubric: Any) -> bool:
    """True when an author scores groups in a way of their own, of which the weights say nothing."""
    return scores_groups_itself(rubric) or any(map(_is_its_own, getattr(rubric, "rubrics", None) or ()))


def _weights(rubric: Any) -> dict[str, float] | None:
    """The weight of each metric; None where the reward is no weighted sum of them."""
    names, weights = rubric.get_reward_func_names(), rubric.get_reward_weights()
    if len(names) != len(weights):
        return None
    found: dict[str, float] = {}
    for name, weight in zip(names, weights, strict=True):
        if found.setdefault(name, weight) != weight:
            return None
    return found


def _without_format(weights: Mapping[str, float]) -> dict[str, float] | None:
    kept = {name: weight for name, weight in weights.items() if weight and FORMAT not in name.lower()}
    pays_format = any(weight > 0.0 and FORMAT in name.lower() for name, weight in weights.items())
    most = sum(weight for weight in kept.values() if weight > 0.0)
    if not pays_format or most <= 0.0:
        return None
    return {name: weight / min(1.0, most) for name, weight in kept.items()}
