"""The statistics of evaluations: pure functions over numbers, no I/O, no NumPy (their tests have NumPy twins).

Parts: `distribution` and `percentile` (what values look like), `pass_at_k` and `pass_all_k` (unbiased),
`clustered_mean` (a mean over rollouts whose error is over tasks), `share_interval` (for what is a share of yes and no),
`paired_difference` and `sign_test` (two evaluations of the same tasks), `student_t_quantile`, `format_reward`.
Invariant: rollouts of one task are never treated as independent draws; too little data gives None, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a list of numbers looks like. `std` is the sample's (n - 1), None for a single value."""

    num: int
    mean: float
    std: float | None
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its standard error and its confidence interval, which are None with fewer than two tasks."""

    mean: float
    standard_error: float | None
    interval: tuple[float, float] | None
    num_values: int
    num_clusters: int


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean of B - A over tasks that both have; `interval` and `p_value` are those of a paired t test."""

    mean: float
    standard_error: float | None
    interval: tuple[float, float] | None
    p_value: float | None
    num_pairs: int


def distribution(values: Sequence[float]) -> Distribution | None:
    """Mean, spread and range of `values`; None when there are none."""
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    std = math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else None
    return Distribution(len(values), mean, std, min(values), max(values))


def percentile(ordered: Sequence[float], q: float) -> float:
    """The `q` quantile (0 to 1) of values in ascending order, interpolated linearly as NumPy does by default."""
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def pass_at_k(num_rollouts: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k rollouts is correct. Source: arXiv 2107.03374, eq. 1."""
    return 1.0 - math.comb(num_rollouts - num_correct, k) / math.comb(num_rollouts, k)


def pass_all_k(num_rollouts: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that all of k rollouts are correct (pass^k). Source: arXiv 2406.12045."""
    return math.comb(num_correct, k) / math.comb(num_rollouts, k)


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to `limit`: the k for which pass@k is given."""
    return [1 << power for power in range(limit.bit_length())] if limit > 0 else []


def clustered_mean(clusters: Sequence[Sequence[float]], *, confidence: float = CONFIDENCE) -> Estimate | None:
    """The mean over all values, with an error in which only the clusters (tasks) are independent.

    With G clusters, n values and residuals e: SE = sqrt(G / (G - 1) * sum over clusters of (sum of e)^2) / n, which for
    clusters of equal size is the standard error of their means. The interval is Student's with G - 1 degrees of
    freedom; where every value is 0 or 1 it is `share_interval`. Empty clusters are left out; without values, None.
    Source: Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640, sec. 2.2; G / (G - 1) as in Cameron and
    Miller 2015, "A Practitioner's Guide to Cluster-Robust Inference".
    """
    filled = [cluster for cluster in clusters if cluster]
    num_values = sum(len(cluster) for cluster in filled)
    if not num_values:
        return None
    mean = math.fsum(value for cluster in filled for value in cluster) / num_values
    num_clusters = len(filled)
    if num_clusters < 2:
        return Estimate(mean, None, None, num_values, num_clusters)
    squares = math.fsum(math.fsum(value - mean for value in cluster) ** 2 for cluster in filled)
    error = math.sqrt(squares * num_clusters / (num_clusters - 1)) / num_values
    if all(value in (0, 1) for cluster in filled for value in cluster):
        interval = share_interval(mean, error, num_clusters, confidence=confidence)
    else:
        half = student_t_quantile((1 + confidence) / 2, num_clusters - 1) * error
        interval = (mean - half, mean + half)
    return Estimate(mean, error, interval, num_values, num_clusters)


def share_interval(
    share: float, standard_error: float, num_clusters: int, *, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Wilson's interval for a share between 0 and 1, with the effective number of draws that its error implies.

    It stays inside 0 to 1 and, where all tasks agree on 0 or 1 (an error of 0 that nobody should believe), it is as
    wide as `num_clusters` independent draws make it. Source: Wilson 1927; effective size as in Korn and Graubard 1998.
    """
    spread = share * (1 - share)
    if spread <= 0:
        num_effective, z = float(num_clusters), _normal_quantile((1 + confidence) / 2)
    elif standard_error <= 0:
        return share, share
    else:
        num_effective, z = spread / standard_error**2, student_t_quantile((1 + confidence) / 2, num_clusters - 1)
    weight = z * z / num_effective
    center = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(spread / num_effective + weight / (4 * num_effective))
    return max(0.0, center - half), min(1.0, center + half)


def paired_difference(
    before: Sequence[float], after: Sequence[float], *, confidence: float = CONFIDENCE
) -> Difference | None:
    """How much `after` is above `before` on average, task by task; both hold one mean per task, in the same order.

    Pairing takes the difficulty of the tasks out of the error. Source: arXiv 2411.00640, sec. 4.2 (paired analysis).
    """
    changes = [new - old for old, new in zip(before, after, strict=True)]
    seen = distribution(changes)
    if seen is None or seen.std is None:
        return Difference(seen.mean, None, None, None, 1) if seen else None
    error = seen.std / math.sqrt(seen.num)
    if error <= 1e-12:  # the tasks agree exactly: nothing to estimate a spread from
        return Difference(seen.mean, 0.0, None, None if seen.mean else 1.0, seen.num)
    half = student_t_quantile((1 + confidence) / 2, seen.num - 1) * error
    p_value = 2 * (1 - student_t_cdf(abs(seen.mean / error), seen.num - 1))
    return Difference(seen.mean, error, (seen.mean - half, seen.mean + half), min(1.0, max(0.0, p_value)), seen.num)


def sign_test(num_up: int, num_down: int) -> float:
    """Chance of a split at least this uneven if up and down were equally likely (exact, two-sided; McNemar's test)."""
    total = num_up + num_down
    tail = sum(math.comb(total, i) for i in range(min(num_up, num_down) + 1)) / (1 << total)
    return min(1.0, 2 * tail)


def format_reward(means: Mapping[str, float]) -> tuple[str, float] | None:
    """The metric that says whether answers have the asked form, by its name, and its mean; None when there is none."""
    named = sorted((name for name in means if "format" in name.lower()), key=lambda name: (len(name), name))
    return (named[0], means[named[0]]) if named else None


def student_t_quantile(probability: float, degrees: int) -> float:
    """The value below which `probability` (over 0.5) of Student's t with these degrees of freedom lies."""
    low, high = 0.0, 1.0
    while student_t_cdf(high, degrees) < probability:
        low, high = high, high * 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_t_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def student_t_cdf(value: float, degrees: int) -> float:
    """The share of Student's t below `value` >= 0. Source: DLMF 8.17 (the t tail is a regularized incomplete beta)."""
    return 1 - _incomplete_beta(degrees / (degrees + value * value), degrees / 2, 0.5) / 2


def _normal_quantile(probability: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(probability)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b) by its continued fraction (DLMF 8.17.22, Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny, result, c, d = 1e-300, 1.0, 1.0, 0.0
    for step in range(400):
        m = step // 2
        if step == 0:
            term = 1.0
        elif step % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / (1 + term * d or tiny)
        c = 1 + term / c or tiny
        result *= c * d
        if abs(1 - c * d) < 1e-14 and step > 2:
            break
    return math.exp(log_front) * (result - 1) / a
