"""Why a run is as it is: how old what it trains on is, what fails and how, who waits for whom, how long it idles.

Parts: `RunCauses`, what the cards of the run page show; `causes_of`, which reads it; `chains_of`, the graph of waits as
paths. A path ends at whom everybody on it waits for in the end, which is where to look when a run stands still.
"""

from __future__ import annotations

from dataclasses import dataclass

from mettle.hub.metrics import MetricTable
from mettle.hub.models import ShownWait
from mettle.hub.pipeline import owner_process
from mettle.hub.series import TIMES
from mettle.hub.steps import ErrorCause, StepTable

SHOWN_CAUSES = 8
MAX_BARS = 9
"""Bars of the histogram; what is older stands in the last."""
IDLE_STEPS = 8
"""The share of the time that is waited is taken over this many steps."""


@dataclass(frozen=True, slots=True)
class AgeBar:
    """Trained tokens of one age, as a share of all. `is_open`: that age and older."""

    age: int
    num_tokens: int
    part: float
    is_open: bool


@dataclass(frozen=True, slots=True)
class RunCauses:
    """What the cards show. `waiting_part` is the share of the trainer's last steps that it waited for a batch."""

    ages: list[AgeBar]
    causes: list[ErrorCause]
    num_hidden_causes: int
    chains: list[list[ShownWait]]
    waiting_part: float | None


def causes_of(steps: StepTable, metrics: MetricTable, waits: list[ShownWait]) -> RunCauses:
    """As it stands now."""
    causes = sorted(steps.causes.values(), key=lambda cause: -cause.num_rollouts)
    return RunCauses(
        ages=ages_of(dict(steps.staleness)),
        causes=causes[:SHOWN_CAUSES],
        num_hidden_causes=max(0, len(causes) - SHOWN_CAUSES),
        chains=chains_of(waits),
        waiting_part=waiting_part(metrics),
    )


def ages_of(tokens: dict[int, int]) -> list[AgeBar]:
    """A bar for each age from 0 to the oldest, those beyond `MAX_BARS` in the last."""
    total = sum(tokens.values())
    if not total:
        return []
    oldest = max(tokens)
    bars = [tokens.get(age, 0) for age in range(min(oldest + 1, MAX_BARS))]
    bars[-1] += sum(num for age, num in tokens.items() if age >= MAX_BARS)
    is_cut = oldest >= MAX_BARS
    return [AgeBar(age, num, num / total, is_cut and age == MAX_BARS - 1) for age, num in enumerate(bars)]


def chains_of(waits: list[ShownWait]) -> list[list[ShownWait]]:
    """Paths through the graph of waits, from whom nobody waits for; a circle begins with its longest wait."""
    by_owner: dict[str, list[ShownWait]] = {}
    for wait in waits:
        by_owner.setdefault(owner_process(wait.owner), []).append(wait)
    awaited = {owner_process(wait.target) for wait in waits}
    starts = [wait for wait in waits if owner_process(wait.owner) not in awaited]
    chains, seen = [], set()
    for first in [*starts, *waits]:  # what no start leads to is part of a circle
        if id(first) in seen:
            continue
        chain = [first]
        seen.add(id(first))
        while following := next(
            (wait for wait in by_owner.get(owner_process(chain[-1].target), []) if id(wait) not in seen), None
        ):
            chain.append(following)
            seen.add(id(following))
        chains.append(chain)
    return chains


def waiting_part(metrics: MetricTable) -> float | None:
    """Between 0 and 1; None before the trainer has told the times of a step."""
    step_s, wait_s = TIMES[0][0], TIMES[2][0]
    steps = list(metrics.columns.get(step_s, {}))[-IDLE_STEPS:]
    parts = [sum(metrics.columns.get(name, {}).get(step, 0.0) for name, _, _ in TIMES) for step in steps]
    if not sum(parts):
        return None
    return sum(metrics.columns.get(wait_s, {}).get(step, 0.0) for step in steps) / sum(parts)
