"""Means with honest intervals. Rollouts of one task are not independent, so tasks are the unit.

The mean of an evaluation is the mean over tasks of the task's mean, and its 95 % interval is Student's t over the task
means. Source: clustered standard errors as in "Adding error bars to evals", arXiv 2411.00640.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z_975 = 1.959963984540054
T_975_SMALL = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""Student's t at 97.5 % for 1 to 10 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval; None where there is too little to say it."""

    mean: float | None
    interval: tuple[float, float] | None


def clustered_mean(rewards_by_task: Sequence[Sequence[float]]) -> Estimate:
    """Mean over tasks, each task one cluster. Tasks without a reward are left out."""
    means = [math.fsum(rewards) / len(rewards) for rewards in rewards_by_task if rewards]
    if not means:
        return Estimate(None, None)
    mean = math.fsum(means) / len(means)
    if len(means) == 1:
        return Estimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in means) / (len(means) - 1)
    half = t_975(len(means) - 1) * math.sqrt(variance / len(means))
    return Estimate(mean, (mean - half, mean + half))


def t_975(degrees: int) -> float:
    """The 97.5 % point of Student's t: a table to 10 degrees, then the Cornish-Fisher expansion (error < 2e-4)."""
    if degrees <= len(T_975_SMALL):
        return T_975_SMALL[degrees - 1]
    z, n = Z_975, degrees
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that one of k rollouts, drawn from those made, is correct: 1 - C(n-c, k) / C(n, k)."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
