"""Which task comes next.

Parts: `StandardSampler` (epoch by epoch), `DifficultyPool` (middling tasks first), `Curriculum` (environments mixed by
their ratios). Every choice is a function of the seed and of the draws so far, and those are in the ledger: after a
restart the order goes on where it was, with nothing else to save. Invariant: a row is drawn once an epoch, where the
epoch of a row under `difficulty_pool` is how often it has been drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from mettle.orchestrator.config import CurriculumConfig

UNSEEN, HARD, NORMAL, EASY = "unseen", "hard", "normal", "easy"


@dataclass(frozen=True, slots=True)
class PastDraw:
    """An earlier draw of a row, and the mean reward of its group once it has one."""

    example_id: int
    mean_reward: float | None


class TaskSampler(Protocol):
    """Rows of one environment, one after the other."""

    def next(self) -> tuple[int, int]:
        """(epoch, example_id) of the next draw."""
        ...

    def observe(self, example_id: int, mean_reward: float) -> None:
        """A group of the row was scored."""
        ...

    @property
    def num_drawn(self) -> int:
        """Draws so far."""
        ...


class StandardSampler:
    """All rows, epoch by epoch, each epoch in its own seeded order (or in source order)."""

    def __init__(self, name: str, size: int, past: Iterable[PastDraw], *, seed: int, shuffle: bool) -> None:
        self._name = name
        self._size = size
        self._seed = seed
        self._shuffle = shuffle
        self._num_drawn = sum(1 for _ in past)
        self._epoch = -1
        self._order: list[int] = []

    @property
    def num_drawn(self) -> int:
        """Draws so far."""
        return self._num_drawn

    def next(self) -> tuple[int, int]:
        """The next row of the current epoch."""
        epoch, position = divmod(self._num_drawn, self._size)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = list(range(self._size))
            if self._shuffle:
                random.Random(f"{self._seed}/{self._name}/{epoch}").shuffle(self._order)
        self._num_drawn += 1
        return epoch, self._order[position]

    def observe(self, example_id: int, mean_reward: float) -> None:
        """Rewards change nothing here."""


class DifficultyPool:
    """Rows in pools by the latest mean reward of their group; a pool is drawn from by its weight times its size."""

    def __init__(self, name: str, size: int, past: Iterable[PastDraw], config: CurriculumConfig, *, seed: int) -> None:
        self._name = name
        self._seed = seed
        self._config = config
        self._weights = {UNSEEN: 1.0, HARD: config.hard_weight, NORMAL: 1.0, EASY: config.easy_weight}
        self._times_drawn = [0] * size
        self._num_drawn = 0
        self._pools: dict[str, list[int]] = {UNSEEN: list(range(size)), HARD: [], NORMAL: [], EASY: []}
        self._place = [(UNSEEN, row) for row in range(size)]
        for draw in past:
            self._num_drawn += 1
            self._times_drawn[draw.example_id] += 1
            if draw.mean_reward is not None:
                self.observe(draw.example_id, draw.mean_reward)

    @property
    def num_drawn(self) -> int:
        """Draws so far."""
        return self._num_drawn

    def next(self) -> tuple[int, int]:
        """A row of a pool, both chosen by a generator that depends on the seed and the number of draws alone."""
        rng = random.Random(f"{self._seed}/{self._name}/{self._num_drawn}")
        names = [name for name, rows in self._pools.items() if rows]
        weights = [self._weights[name] * len(self._pools[name]) for name in names]
        if not any(weights):
            weights = [1.0] * len(names)
        rows = self._pools[rng.choices(names, weights)[0]]
        example_id = rows[rng.randrange(len(rows))]
        epoch = self._times_drawn[example_id]
        self._times_drawn[example_id] += 1
        self._num_drawn += 1
        return epoch, example_id

    def observe(self, example_id: int, mean_reward: float) -> None:
        """Move the row to the pool of its latest reward."""
        if mean_reward <= self._config.hard_below:
            new = HARD
        else:
            new = NORMAL if mean_reward <= self._config.easy_above else EASY
        old, position = self._place[example_id]
        rows = self._pools[old]
        last = rows.pop()
        if last != example_id:
            rows[position] = last
            self._place[last] = (old, position)
        self._place[example_id] = (new, len(self._pools[new]))
        self._pools[new].append(example_id)


class Curriculum:
    """Environments mixed exactly by their ratios: the next draw goes to the one that is furthest behind its share."""

    def __init__(
        self, samplers: Mapping[str, TaskSampler], ratios: Mapping[str, float], uid: Callable[[str, int], str]
    ) -> None:
        self._samplers = samplers
        self._shares = {name: ratio / sum(ratios.values()) for name, ratio in ratios.items()}
        self._uid = uid

    def draw(self, count: int) -> list[tuple[str, str, int, int]]:
        """The next `count` draws as (env_id, uid, epoch, example_id)."""
        draws = []
        for _ in range(count):
            total = 1 + sum(sampler.num_drawn for sampler in self._samplers.values())
            name = max(self._shares, key=lambda n: self._shares[n] * total - self._samplers[n].num_drawn)
            epoch, example_id = self._samplers[name].next()
            draws.append((name, self._uid(name, example_id), epoch, example_id))
        return draws

    def observe(self, env_id: str, example_id: int, mean_reward: float) -> None:
        """A group was scored."""
        self._samplers[env_id].observe(example_id, mean_reward)

    def state(self) -> dict[str, int]:
        """Draws by environment, for the record."""
        return {name: sampler.num_drawn for name, sampler in self._samplers.items()}
