"""How often the 95 % intervals of evaluations hold the truth, for kinds of rewards and numbers of tasks.

Each cell draws many evaluations whose true mean is known, and counts those whose interval holds it. Beside it, on the
same draws, Student's t over the tasks' means, which is what most reports show. The numbers that matter are the worst
coverage where a range is known (nominal 95 %, at least 93 % everywhere), and the width as a ratio to Student's.
The seed is drawn afresh unless one is given, so that a published table is none that the estimator was fitted to.

Run: `python benchmarks/interval_coverage.py [--draws 4000] [--seed N] [--json FILE]`
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mettle.evals.estimator import ANYTHING, COUNT, Range, mean_over_tasks, paired_difference, student_t_quantile

NUM_TASKS = (4, 20, 200)
Rng = np.random.Generator
Sample = list[list[float]]


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of reward: draws the rollouts of each task; `mean` is the truth."""

    family: str
    name: str
    mean: float
    draw: Callable[[Rng, int], Sample]
    within: Range | None = None


@dataclass(frozen=True, slots=True)
class Pairs:
    """A kind of change: draws one mean per task before and after; `mean` is the true difference."""

    family: str
    name: str
    mean: float
    draw: Callable[[Rng, int], tuple[list[float], list[float]]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the table: shares of intervals that hold the truth, and mean widths."""

    family: str
    name: str
    num_tasks: int
    num_draws: int
    coverage: float
    coverage_t: float
    width: float
    width_t: float


def singles(values: np.ndarray) -> Sample:
    """One rollout a task."""
    return [[value] for value in values.tolist()]


def bernoulli(p: float) -> Case:
    return Case("right or wrong", f"p = {p:g}", p, lambda rng, n: singles((rng.random(n) < p).astype(float)))


def beta(a: float, b: float) -> Case:
    return Case("bounded", f"beta({a:g}, {b:g})", a / (a + b), lambda rng, n: singles(rng.beta(a, b, n)))


def levels(values: tuple[float, ...], chances: tuple[float, ...]) -> Case:
    mean = sum(v * p for v, p in zip(values, chances, strict=True))
    return Case("bounded", f"levels {values} {chances}", mean, lambda rng, n: singles(rng.choice(values, n, p=chances)))


def clustered(a: float, b: float, low: int, high: int) -> Case:
    """Right or wrong; each task has a difficulty of its own and `low` to `high` rollouts that were scored."""

    def draw(rng: Rng, n: int) -> Sample:
        chances, sizes = rng.beta(a, b, n), rng.integers(low, high + 1, n)
        return [(rng.random(m) < p).astype(float).tolist() for p, m in zip(chances, sizes, strict=True)]

    size = f"{low}" if low == high else f"{low} to {high}"
    return Case("clustered", f"task ~ beta({a:g}, {b:g}), {size} rollouts", a / (a + b), draw)


def clustered_values(a: float, b: float, size: int) -> Case:
    """Graded rewards around the task's own mean."""

    def draw(rng: Rng, n: int) -> Sample:
        means = rng.beta(a, b, n)[:, None]
        return rng.beta(5 * means + 1e-9, 5 * (1 - means) + 1e-9, (n, size)).tolist()

    return Case("clustered", f"graded, task ~ beta({a:g}, {b:g}), {size} rollouts", a / (a + b), draw)


def unbounded(name: str, mean: float, draw: Callable[[Rng, int], np.ndarray], within: Range = COUNT) -> Case:
    return Case("no upper end", name, mean, lambda rng, n: singles(draw(rng, n)), within)


def flips(up: float, down: float) -> Pairs:
    """Right or wrong before and after: a share turns right, a share turns wrong, the rest stays."""

    def draw(rng: Rng, n: int) -> tuple[list[float], list[float]]:
        kind = rng.choice(4, n, p=(up, down, (1 - up - down) / 2, (1 - up - down) / 2))
        return np.isin(kind, (1, 2)).astype(float).tolist(), np.isin(kind, (0, 2)).astype(float).tolist()

    return Pairs("paired", f"{up:g} turn right, {down:g} wrong", up - down, draw)


def shifted(a: float, b: float, c: float, d: float, size: int) -> Pairs:
    """Shares of `size` rollouts; the task's chance is mixed with one that is its own on either side."""

    def draw(rng: Rng, n: int) -> tuple[list[float], list[float]]:
        both, one, other = rng.beta(a, b, n), rng.beta(a, b, n), rng.beta(c, d, n)
        before, after = (rng.binomial(size, (both + mine) / 2) / size for mine in (one, other))
        return before.tolist(), after.tolist()

    mean = (c / (c + d) - a / (a + b)) / 2
    return Pairs("paired", f"beta({a:g}, {b:g}) to beta({c:g}, {d:g}), {size} rollouts", mean, draw)


CASES: tuple[Case | Pairs, ...] = (
    *(bernoulli(p) for p in (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98)),
    *(beta(a, b) for a, b in ((1, 1), (0.5, 0.5), (0.1, 0.1), (2, 8), (1, 20), (0.05, 0.95), (0.5, 50), (8, 2))),
    *(beta(a, b) for a, b in ((20, 1), (0.95, 0.05), (30, 30))),
    levels((0.0, 0.1, 1.0), (0.3, 0.65, 0.05)),
    levels((0.0, 0.2, 1.0), (0.05, 0.05, 0.9)),
    levels((0.1, 0.9), (0.98, 0.02)),
    *(clustered(a, b, m, m) for a, b in ((1, 1), (0.1, 0.1), (0.2, 1.8), (9, 1), (0.05, 2)) for m in (4, 16)),
    *(clustered(a, b, 1, 8) for a, b in ((1, 1), (0.2, 1.8), (9, 1))),
    *(clustered_values(a, b, 8) for a, b in ((1, 1), (0.3, 2.7), (4, 0.4))),
    *(flips(up, down) for up, down in ((0.0, 0.0), (0.02, 0.02), (0.1, 0.02), (0.3, 0.1), (0.02, 0.2), (0.5, 0.05))),
    *(shifted(a, b, c, d, m) for a, b, c, d, m in ((1, 1, 1, 1, 4), (1, 1, 2, 1, 4), (0.2, 1.8, 0.4, 1.6, 16))),
    unbounded("Poisson(0.25)", 0.25, lambda rng, n: rng.poisson(0.25, n).astype(float)),
    unbounded("Poisson(4)", 4.0, lambda rng, n: rng.poisson(4, n).astype(float)),
    unbounded("geometric(0.3), turns", 1 / 0.3, lambda rng, n: rng.geometric(0.3, n).astype(float)),
    unbounded("exponential, seconds", 1.0, lambda rng, n: rng.exponential(1, n)),
    unbounded("lognormal(1), tokens", math.exp(0.5), lambda rng, n: rng.lognormal(0, 1, n)),
    unbounded("normal(-3, 1)", -3.0, lambda rng, n: rng.normal(-3, 1, n), ANYTHING),
    unbounded("normal(0, 5)", 0.0, lambda rng, n: rng.normal(0, 5, n), ANYTHING),
)


def student(means: np.ndarray) -> tuple[float, float]:
    """Student's t interval."""
    half = student_t_quantile(0.975, len(means) - 1) * means.std(ddof=1) / math.sqrt(len(means))
    return means.mean() - half, means.mean() + half


def interval(case: Case | Pairs, rng: Rng, num_tasks: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """(ours, Student's) of one evaluation."""
    if isinstance(case, Pairs):
        before, after = case.draw(rng, num_tasks)
        found = paired_difference(before, after, (0.0, 1.0))
        means = np.array(after) - np.array(before)
    else:
        tasks = case.draw(rng, num_tasks)
        found = mean_over_tasks(tasks, case.within)
        means = np.array([sum(task) / len(task) for task in tasks])
    assert found is not None, "there are tasks"
    assert found.interval is not None, "there are two tasks"
    return found.interval, student(means)


def measure(case: Case | Pairs, num_tasks: int, num_draws: int, rng: Rng) -> Cell:
    """One cell of the table."""
    held, widths = np.zeros(2), np.zeros(2)
    for _ in range(num_draws):
        for side, (low, high) in enumerate(interval(case, rng, num_tasks)):
            held[side] += low - 1e-12 <= case.mean <= high + 1e-12
            widths[side] += high - low
    coverage, width = held / num_draws, widths / num_draws
    return Cell(case.family, case.name, num_tasks, num_draws, *coverage.tolist(), *width.tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=4000, help="evaluations a cell")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    rng, started = np.random.default_rng(seed), time.monotonic()
    cells = []
    print(f"seed {seed}, {options.draws} evaluations a cell\n")
    print(f"{'rewards':52} tasks  coverage  Student's   width  Student's")
    for case in CASES:
        for num_tasks in NUM_TASKS:
            cells.append(cell := measure(case, num_tasks, options.draws, rng))
            print(
                f"{case.family + ': ' + case.name:52} {num_tasks:5}  {cell.coverage:8.3f}  {cell.coverage_t:9.3f}"
                f"  {cell.width:6.3g}  {cell.width_t:9.3g}",
                flush=True,
            )
    worst = [
        min((cell for cell in cells if cell.family == family and cell.num_tasks == n), key=lambda cell: cell.coverage)
        for family in dict.fromkeys(case.family for case in CASES)
        for n in NUM_TASKS
    ]
    print("\nworst of each family")
    for cell in worst:
        print(f"{cell.family:16} {cell.num_tasks:4} tasks  {cell.coverage:.3f}  {cell.name}")
    if options.json:
        found = {
            "machine": platform.machine(), "python": platform.python_version(), "seed": seed,
            "seconds": round(time.monotonic() - started), "cells": [asdict(cell) for cell in cells],
            "worst": [asdict(cell) for cell in worst],
        }  # fmt: skip
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
