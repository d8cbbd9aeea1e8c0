"""The one estimator: every mean that Mettle shows, how sure it is, and what lists of numbers look like.

Parts: `mean_over_tasks` (a mean and its 95 % interval), `paired_difference` and `sign_test` (two evaluations of the
same tasks), `pass_at_k` and `pass_all_k` (unbiased), `known_range` (where values can lie), `spread` and `percentile`
(what values look like), `RunningMean` (the same mean while rollouts come in).
Invariants: tasks are the unit, so the mean is over tasks of each task's mean and rollouts of one task are never taken
for independent draws; an interval lies inside the known range, is never of zero width, and needs two tasks.
Pure functions, no I/O, no NumPy (their tests have NumPy twins). Why this estimator: docs/explanation/estimates.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

CONFIDENCE = 0.95

Range = tuple[float, float]
"""The least and the greatest value that can be; an end that nobody knows is infinite."""

Points = list[tuple[float, int]]
"""Distinct values, and how often each is there."""

SHARE: Range = (0.0, 1.0)
SIGNED: Range = (-1.0, 1.0)
COUNT: Range = (0.0, math.inf)
ANYTHING: Range = (-math.inf, math.inf)

_CONSTANT_WITHIN = 1e-9
_SLACK = 1e-9
_MAX_DISTINCT = 512
_COUNT_PREFIXES = ("num_", "total_", "n_")
_COUNT_SUFFIXES = (
    "_calls",
    "_count",
    "_counts",
    "_tokens",
    "_turns",
    "_steps",
    "_length",
    "_len",
    "_chars",
    "_s",
    "_ms",
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks; its standard error and its 95 % interval are None with fewer than two tasks."""

    mean: float
    standard_error: float | None
    interval: tuple[float, float] | None
    num_values: int
    num_tasks: int


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean of B - A over the tasks that both have; the interval leaves out 0 exactly when `p_value` < 0.05."""

    mean: float
    standard_error: float | None
    interval: tuple[float, float] | None
    p_value: float | None
    num_pairs: int


@dataclass(frozen=True, slots=True)
class Spread:
    """What a list of numbers looks like. `std` is the sample's (n - 1), None for a single value."""

    num: int
    mean: float
    std: float | None
    min: float
    max: float


def known_range(values: Iterable[float], name: str = "") -> Range:
    """Where values that nobody declared a range for can lie: the narrowest usual range that holds what was seen.

    Counts, lengths and times are known by their name (`num_turns`), because one that was 1 each time is no share.
    """
    is_count = name.startswith(_COUNT_PREFIXES) or name.endswith(_COUNT_SUFFIXES)
    low, high = math.inf, -math.inf
    for value in values:
        low, high = min(low, value), max(high, value)
    if low >= 0.0:
        return COUNT if is_count or high > 1.0 + _SLACK else SHARE
    return SIGNED if low >= -1.0 - _SLACK and high <= 1.0 + _SLACK and not is_count else ANYTHING


def mean_over_tasks(tasks: Sequence[Sequence[float]], within: Range | None = None) -> Estimate | None:
    """The mean over tasks of the task's mean; tasks without a value are left out. None when no task has any.

    Each task counts once: none weighs more because fewer of its rollouts failed. `within` is the range that one value
    can have (default: `known_range` of all of them).
    Raises: ValueError for a value outside `within`.
    """
    filled = [task for task in tasks if task]
    if not filled:
        return None
    values = [value for task in filled for value in task]
    within = _checked(values, within or known_range(values))
    means = [mean_of(task) for task in filled]
    mean = mean_of(means)
    if len(means) < 2:
        return Estimate(mean, None, None, len(values), 1)
    sides = _Sides(means, within)
    return Estimate(mean, sides.standard_error, sides.interval(), len(values), len(means))


def paired_difference(
    before: Sequence[float], after: Sequence[float], within: Range | None = None
) -> Difference | None:
    """How much `after` is above `before`, task by task; both hold one mean per task, in the same order.

    Pairing takes the difficulty of the tasks out of the error. `within` is the range of a value on either side.
    Source: arXiv 2411.00640, sec. 4.2 (paired analysis).
    """
    if not before:
        return None
    values = [*before, *after]
    low, high = _checked(values, within or known_range(values))
    reach = high - low
    changes = [new - old for old, new in zip(before, after, strict=True)]
    mean = mean_of(changes)
    if len(changes) < 2:
        return Difference(mean, None, None, None, 1)
    sides = _Sides(changes, (-reach, reach), scale=max(map(abs, values)))
    return Difference(mean, sides.standard_error, sides.interval(), sides.p_value(), len(changes))


def sign_test(num_up: int, num_down: int) -> float:
    """Chance of a split at least this uneven if up and down were equally likely (exact, two-sided; McNemar's test)."""
    total = num_up + num_down
    tail = sum(math.comb(total, i) for i in range(min(num_up, num_down) + 1)) / (1 << total)
    return min(1.0, 2 * tail)


def pass_at_k(num_rollouts: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k rollouts is correct. Source: arXiv 2107.03374, eq. 1."""
    return 1.0 - math.comb(num_rollouts - num_correct, k) / math.comb(num_rollouts, k)


def pass_all_k(num_rollouts: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that all of k rollouts are correct (pass^k). Source: arXiv 2406.12045."""
    return math.comb(num_correct, k) / math.comb(num_rollouts, k)


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to `limit`: the k for which pass@k is given."""
    return [1 << power for power in range(limit.bit_length())] if limit > 0 else []


def mean_of(values: Sequence[float]) -> float:
    """The plain mean of at least one value."""
    return math.fsum(values) / len(values) if len(values) > 1 else values[0]


def spread(values: Sequence[float]) -> Spread | None:
    """Mean, standard deviation and range of `values`; None when there are none."""
    if not values:
        return None
    std = math.sqrt(_variance(values)) if len(values) > 1 else None
    return Spread(len(values), mean_of(values), std, min(values), max(values))


def percentile(ordered: Sequence[float], q: float) -> float:
    """The `q` quantile (0 to 1) of values in ascending order, interpolated linearly as NumPy does by default."""
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Iterable[float]) -> float:
    """The middle of at least one value."""
    return percentile(sorted(values), 0.5)


class RunningMean:
    """The mean over tasks of the task's mean while values come in, in any order; each costs the same."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, tuple[float, int]] = {}
        self._total = 0.0

    def add(self, task: Hashable, value: float) -> None:
        """One more value of a task."""
        total, num = self._tasks.get(task, (0.0, 0))
        self._tasks[task] = total + value, num + 1
        self._total += (total + value) / (num + 1) - (total / num if num else 0.0)

    @property
    def mean(self) -> float | None:
        """None before the first value."""
        return self._total / len(self._tasks) if self._tasks else None


class _Sides:
    """The two one-sided tests that an interval for the mean of independent values is made of.

    Where a range ends, the side is Gaffke's, which is sure for any distribution and needs that end only. Where it does
    not end, nothing is sure for any distribution: the side is Student's t, and Gaffke's with an end put as far beyond
    the values as they are large when all of them are equal. The upper side of counts is also at least the lower one
    mirrored on a logarithmic scale, on which means of long-tailed values are about symmetric.
    """

    def __init__(self, values: Sequence[float], within: Range, scale: float | None = None) -> None:
        points = _gathered(values)
        largest = max(abs(value) for value, _ in points) if scale is None else scale
        self._reach = largest if largest > 0.0 else 1.0
        self._num = len(values)
        self.standard_error = math.sqrt(_variance(values) / len(values))
        self._is_constant = self.standard_error <= _CONSTANT_WITHIN * self._reach
        self._mean = mean_of(values)
        self._within = low, high = within
        self._below, self._above = self._ended(points, low), self._ended([(-v, n) for v, n in points], -high)

    def _ended(self, points: Points, end: float) -> tuple[Points, float] | None:
        """The points as distances from the end of the range, and that end; None where Student's t has to do."""
        if end == -math.inf:
            if not self._is_constant:
                return None
            end = min(value for value, _ in points) - self._reach
        return [*((max(0.0, value - end), num) for value, num in points), (0.0, 1)], end

    def interval(self) -> tuple[float, float]:
        """The 95 % interval."""
        tail = (1 - CONFIDENCE) / 2
        lower, upper = self._bound(self._below, self._mean, tail), -self._bound(self._above, -self._mean, tail)
        if self._within == COUNT:
            upper = max(upper, self._mean**2 / lower if lower > 0.0 else -math.log(tail) / self._num)
        low, high = self._within
        return max(lower, low), min(upper, high)

    def _bound(self, side: tuple[Points, float] | None, mean: float, tail: float) -> float:
        if side is None:
            return mean - student_t_quantile(1 - tail, self._num - 1) * self.standard_error
        points, end = side
        return end + _gaffke_bound(points, tail)

    def p_value(self) -> float:
        """Two-sided, that the mean is 0."""
        return min(1.0, 2 * min(self._chance(self._below, self._mean), self._chance(self._above, -self._mean)))

    def _chance(self, side: tuple[Points, float] | None, mean: float) -> float:
        """One-sided: how likely values as high as these are although their mean is 0 or less."""
        if side is None:
            share = student_t_cdf(abs(mean) / self.standard_error, self._num - 1)
            return 1 - share if mean > 0 else share
        points, end = side
        return _gaffke_chance(points, -end)


def _gathered(values: Sequence[float]) -> Points:
    """The distinct values with how often each is there.

    Many values are gathered into cells that keep their mean: the cost stays bounded, and the variance that is lost is
    below a millionth of the square of their range.
    """
    counts = Counter(values)
    if len(counts) <= _MAX_DISTINCT:
        return list(counts.items())
    low = min(counts)
    per_width = (_MAX_DISTINCT - 1) / (max(counts) - low)
    totals, nums = [0.0] * _MAX_DISTINCT, [0] * _MAX_DISTINCT
    for value, num in counts.items():
        cell = int((value - low) * per_width)
        totals[cell] += value * num
        nums[cell] += num
    return [(total / num, num) for total, num in zip(totals, nums, strict=True) if num]


def _gaffke_bound(points: Points, tail: float) -> float:
    """The lower confidence bound of the mean of values that are 0 or more, with an error of `tail` at most.

    It is the `tail` quantile of sum(D_i x_i), where x are the values and 0 (which `points` hold) and D is uniform on
    the simplex: for values of 0 and 1 the bound of Clopper and Pearson, for many values as narrow as Student's t.
    Source: Gaffke 2005, "Three test statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative
    variable"; compared in Phan et al. 2021, "Towards practical mean bounds for small samples", arXiv 2106.03163.
    """
    top = max(value for value, _ in points)
    if top <= 0.0:
        return 0.0
    points = [(value / top, num) for value, num in points]
    # A tilt from 0 upwards moves the bound from the mean down to 0, and the chance with it to 0. The root is looked
    # for on logarithmic scales, where the chance is nearly straight (Illinois' variant of the false position).
    small, large = 1e-3 / math.sqrt(sum(num for _, num in points)), 1.0
    while _tilted(points, large)[1] > tail:
        small, large = large, large * 8
    left, right = math.log(small), math.log(large)
    chance_left, chance_right = (math.log(max(_tilted(points, at)[1], 1e-300) / tail) for at in (small, large))
    bound, side = 0.0, 0
    for _ in range(60):
        middle = (left * chance_right - right * chance_left) / (chance_right - chance_left)
        bound, chance = _tilted(points, math.exp(middle))
        found = math.log(max(chance, 1e-300) / tail)
        if abs(found) <= 1e-5:
            break
        if found > 0:
            left, chance_left, chance_right, side = middle, found, chance_right / (2 if side > 0 else 1), 1
        else:
            right, chance_right, chance_left, side = middle, found, chance_left / (2 if side < 0 else 1), -1
    return bound * top


def _gaffke_chance(points: Points, threshold: float) -> float:
    """The chance that sum(D_i x_i) <= `threshold`: the p value of "the mean is at most the threshold".

    1 for a threshold above the mean of the points, where the p value of the other side is the smaller one.
    """
    if threshold <= 0.0:
        return 0.0
    top = max(value for value, _ in points)
    if threshold >= top:
        return 1.0
    points, threshold = [(value / top, num) for value, num in points], threshold / top
    if threshold >= _tilted_mean(points, 0.0):
        return 1.0
    small, large = 0.0, 1.0
    while _tilted_mean(points, large) > threshold:
        small, large = large, large * 4
    for _ in range(60):
        middle = (small + large) / 2
        small, large = (middle, large) if _tilted_mean(points, middle) > threshold else (small, middle)
    return min(1.0, max(0.0, _tilted(points, (small + large) / 2)[1]))


def _tilted_mean(points: Points, tilt: float) -> float:
    total = weights = 0.0
    for value, count in points:
        weight = count / (1.0 + tilt * value)
        weights += weight
        total += weight * value
    return total / weights


def _tilted(points: Points, tilt: float) -> tuple[float, float]:
    """(t, chance that sum(D_i x_i) <= t), for the t at which the saddle point lies where `tilt` says.

    D is exponential draws over their sum, so the chance is that of sum(E_i (x_i - t)) <= 0. With K(s) =
    -sum(log(1 - s (x_i - t))) and 1 - s (x_i - t) = (1 + s t) (1 + tilt x_i), K'(s) = 0 gives t as the tilted mean.
    Source: Lugannani and Rice 1980; relative error below 3 % of the tail in tests, from n = 2 on.
    """
    t = _tilted_mean(points, tilt)
    s = -tilt / (1.0 + tilt * t)
    log_sum = curvature = skewness = 0.0
    for value, count in points:
        base = (1.0 + tilt * value) / (1.0 + tilt * t)
        step = (value - t) / base
        log_sum -= count * math.log(base)
        curvature += count * step * step
        skewness += 2.0 * count * step * step * step
    w = math.copysign(math.sqrt(max(0.0, -2.0 * log_sum)), s)
    if abs(w) < 1e-4:
        return t, 0.5 + skewness / (6.0 * math.sqrt(2.0 * math.pi) * curvature**1.5)
    u = s * math.sqrt(curvature)
    return t, _normal_cdf(w) + math.exp(-w * w / 2) / math.sqrt(2 * math.pi) * (1 / w - 1 / u)


def _normal_cdf(value: float) -> float:
    return math.erfc(-value / math.sqrt(2.0)) / 2.0


def _checked(values: Sequence[float], within: Range) -> Range:
    low, high = within
    slack = _SLACK * max([1.0, *(abs(end) for end in within if math.isfinite(end))])
    if min(values) < low - slack or max(values) > high + slack:
        raise ValueError(f"values from {min(values):g} to {max(values):g} are said to lie within {low:g} and {high:g}")
    return within


def _variance(values: Sequence[float]) -> float:
    mean = mean_of(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


@lru_cache(maxsize=256)
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
