"""Models on one environment, without a ranking inside the noise.

Parts: `Ranked` (an evaluation that may stand there, pushed or of this machine's store), `leaderboard`, `Place`. Of each
model its newest completed evaluation stands; one of this machine stands beside a pushed one of the same model. A place
says how many others are surely above: those whose 95 % interval lies wholly above one's own. Models whose intervals
overlap share a place, whatever their means are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

from mettle.evals.entries import EvaluationEntry
from mettle.wording import number


@dataclass(frozen=True, slots=True)
class Ranked:
    """An evaluation with an interval. `name` is what a comparison takes, `at` when it ended (seconds since 1970)."""

    name: str
    address: str
    environment: str
    model: str
    mean: float
    ci_low: float
    ci_high: float
    num_samples: int
    num_tasks: int | None
    at: float
    is_local: bool


@dataclass(frozen=True, slots=True)
class Place:
    """One model. `last` is the lowest place that the intervals leave open to it."""

    first: int
    last: int
    result: Ranked

    @property
    def shown(self) -> str:
        """As a list has it: 1, or 2-4 where it could be any of these."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def leaderboard(results: Iterable[Ranked]) -> list[Place]:
    """The models, the highest mean first."""
    newest = {(each.model, each.is_local): each for each in sorted(results, key=lambda each: each.at)}
    ranked = sorted(newest.values(), key=lambda each: (-each.mean, each.model, each.is_local))
    lows, highs = sorted(each.ci_low for each in ranked), sorted(each.ci_high for each in ranked)
    return [
        Place(1 + len(ranked) - bisect_right(lows, one.ci_high), len(ranked) - bisect_left(highs, one.ci_low), one)
        for one in ranked
    ]


def rank_local(entries: Iterable[tuple[str, EvaluationEntry]]) -> list[Ranked]:
    """The same of this machine's store; each with the name it has in addresses."""
    found = []
    for name, entry in entries:
        if entry.problem is not None or not entry.is_complete or entry.reward is None or entry.interval is None:
            continue
        address = f"/{quote(name)}" if name.startswith("runs/") else f"/evaluations/{quote(name, safe='')}"
        reward = (entry.metadata.get("stats") or {}).get("reward") or {}
        num_tasks = number(reward.get("num_tasks"))
        found.append(
            Ranked(
                name, address, entry.env_id, entry.model, entry.reward, *entry.interval, entry.num_done or 0,
                None if num_tasks is None else int(num_tasks), entry.modified_at, True,
            )
        )  # fmt: skip
    return found
