"""Rules of thumb, from a baseline evaluation, about what to change before training.

Parts: `Advice`, `advise`, `share_that_teaches`. A group teaches only when its rollouts differ, so the group size is the
smallest at which half of the tasks are expected to differ. Invariant: each piece of advice states the figure behind it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mettle.quality.evaluations import Distribution

MIN_TRIES = 10
EASY_MEAN = 0.8
GROUP_SIZES = (4, 8, 16, 32, 64)
WANTED_SHARE = 0.5
MIN_FILTERED_SHARE = 0.3
HARD_FILTER = "[orchestrator.curriculum] sampler = 'difficulty_pool', hard_weight = 0.2: they come up less often"
EASY_FILTER = "[orchestrator.curriculum] sampler = 'difficulty_pool', easy_weight = 0.2: they come up less often"


@dataclass(frozen=True, slots=True)
class Advice:
    """`topic` is what it is about; `finding` the figure; `action` what to do, with the setting's name."""

    topic: str
    finding: str
    action: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON wants it."""
        return asdict(self)


def advise(found: Distribution) -> list[Advice]:
    """What the baseline says about difficulty, group size, tasks and model."""
    if found.mean is None:
        return [Advice("baseline", "no rollout has a reward", "mend the errors first, then measure again")]
    advice = [_difficulty(found)]
    if max(found.group_tries, default=0) < 2:
        return [*advice, Advice("group size", "each task was tried once", "measure with -r 4 or more to choose it")]
    advice.append(_group_size(found))
    advice += _filters(found)
    return advice


def share_that_teaches(passes: tuple[float, ...], tries: tuple[int, ...], group_size: int) -> float:
    """Expected share of tasks whose group of `group_size` has both passes and failures.

    A pass rate of 0 or 1 out of few tries is not taken at its word: it is drawn a little to the middle
    (Jeffreys: half a pass and half a failure are added).
    """
    if not passes:
        return 0.0
    rates = [(p * n + 0.5) / (n + 1) for p, n in zip(passes, tries, strict=True)]
    return sum(1 - rate**group_size - (1 - rate) ** group_size for rate in rates) / len(rates)


def _difficulty(found: Distribution) -> Advice:
    mean = found.mean or 0.0
    solved = sum(rate > 0 for rate in found.group_passes)
    total = len(found.group_passes)
    if solved == 0 and found.num_scored >= MIN_TRIES:
        action = "too hard for this model: take easier tasks, a larger model, or warm up on demonstrations (SFT) first"
        return Advice("difficulty", f"no pass in {found.num_scored} tries", action)
    if solved == 0:
        return Advice("difficulty", f"no pass in {found.num_scored} tries, which is too few to tell", "try 10 or more")
    if mean >= EASY_MEAN:
        action = "too easy: little is left to learn; take harder tasks or a smaller model"
        return Advice("difficulty", f"mean reward {mean:.2f}", action)
    return Advice(
        "difficulty", f"mean reward {mean:.2f}, {solved} of {total} tasks passed at least once", "fit to train"
    )


def _group_size(found: Distribution) -> Advice:
    shares = {size: share_that_teaches(found.group_passes, found.group_tries, size) for size in GROUP_SIZES}
    enough = [size for size, share in shares.items() if share >= WANTED_SHARE]
    if found.num_groups and found.num_varying_groups == 0:
        what = f"none of {found.num_groups} groups varies"
        if all(rate in (0.0, 1.0) for rate in found.group_passes):
            action = "nothing can be learned like this: raise the temperature, give partial credit, mix other tasks in"
            return Advice("group size", what, action)
    size = enough[0] if enough else GROUP_SIZES[-1]
    what = f"with {size} rollouts a group, {shares[size]:.0%} of the tasks are expected to differ within"
    return Advice("group size", what, f"orchestrator.group_size = {size}")


def _filters(found: Distribution) -> list[Advice]:
    total = len(found.group_passes)
    never = sum(rate == 0.0 for rate in found.group_passes)
    always = sum(rate == 1.0 for rate in found.group_passes)
    advice = []
    if never >= MIN_FILTERED_SHARE * total:
        what = f"{never} of {total} tasks were never passed"
        advice.append(Advice("hard tasks", what, HARD_FILTER))
    if always >= MIN_FILTERED_SHARE * total:
        what = f"{always} of {total} tasks were always passed"
        advice.append(Advice("easy tasks", what, EASY_FILTER))
    if never + always and not advice:
        what = f"{never + always} of {total} tasks do not vary"
        advice.append(
            Advice("filter", what, "orchestrator.filter_zero_advantages = true (the default) leaves them out")
        )
    return advice
