"""What an evaluation comes to, with how sure one can be: `results.stats`.

Parts: `stats_of` (facts in, one nested record out). Every mean is over tasks, with a standard error and an interval.
Invariants: a rollout that failed is in the error rates and the token counts and in no average of rewards; what is not
known (a price, the tokens, an error over one task) is None and never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mettle.clients.prices import Price
from mettle.evals.estimator import (
    SHARE,
    known_range,
    mean_of,
    mean_over_tasks,
    pass_all_k,
    pass_at_k,
    percentile,
    powers_of_two,
    spread,
)
from mettle.evals.facts import RolloutFacts
from mettle.evals.passing import PassRule
from mettle.records.record import Record

PERCENTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


class Stats(Record):
    """A nested table of figures; keys read as attributes too."""

    __slots__ = ()


def stats_of(
    rollouts: Sequence[RolloutFacts],
    *,
    rollouts_per_example: int,
    pass_threshold: float = 0.5,
    pass_on: Mapping[str, float] | None = None,
    price: Price | None = None,
) -> Stats:
    """The statistics of an evaluation; `pass_threshold` and `pass_on` are those of `PassRule`."""
    rule = PassRule(pass_threshold, pass_on)
    tasks = by_task(rollouts)
    rewards = [[facts.reward for facts in task if facts.reward is not None] for task in tasks.values()]
    num_scored = sum(map(len, rewards))
    return Stats(
        num_rollouts=len(rollouts),
        num_tasks=len(tasks),
        num_scored=num_scored,
        reward=(reward := _mean(rewards)),
        avg_at_k=Stats({str(rollouts_per_example): reward.mean} if reward is not None else {}),
        **_passes(tasks.values(), rollouts_per_example, rule),
        pass_threshold=pass_threshold,
        pass_on=Stats(pass_on) if pass_on else None,
        metrics=_metrics(tasks.values()),
        groups=_groups(rewards),
        errors=_errors(rollouts),
        truncation_rate=_rate(sum(facts.is_truncated for facts in rollouts), len(rollouts)),
        stop_conditions=Stats(Counter(str(facts.stop_condition) for facts in rollouts if facts.cause is None)),
        tokens=_tokens(rollouts),
        cost=_cost(rollouts, price),
        timing=Stats(
            {
                name: _profile([value for facts in rollouts if (value := getattr(facts, name)) is not None])
                for name in ("total_s", "model_s", "env_s", "scoring_s")
            }
        ),
        turns=_profile([float(facts.num_turns) for facts in rollouts if facts.cause is None]),
    )


def by_task(rollouts: Iterable[RolloutFacts]) -> dict[Any, list[RolloutFacts]]:
    """The rollouts of each task, in the order in which the tasks first appear."""
    tasks: dict[Any, list[RolloutFacts]] = {}
    for facts in rollouts:
        tasks.setdefault(facts.example_id, []).append(facts)
    return tasks


def _mean(tasks: Sequence[Sequence[float]], name: str = "") -> Stats | None:
    values = [value for task in tasks for value in task]
    estimate, seen = mean_over_tasks(tasks, known_range(values, name)), spread(values)
    if estimate is None or seen is None:
        return None
    return Stats(
        mean=estimate.mean,
        standard_error=estimate.standard_error,
        interval=list(estimate.interval) if estimate.interval else None,
        std=seen.std,
        min=seen.min,
        max=seen.max,
        num_tasks=estimate.num_tasks,
    )


def _passes(tasks: Iterable[Sequence[RolloutFacts]], rollouts_per_example: int, rule: PassRule) -> dict[str, Stats]:
    """pass@k and pass^k over the tasks with at least k scored rollouts."""
    scored = [[facts for facts in task if facts.reward is not None] for task in tasks]
    counts = [(len(task), sum(map(rule.holds, task))) for task in scored]
    found: dict[str, Stats] = {}
    for name, estimator in (("pass_at_k", pass_at_k), ("pass_all_k", pass_all_k)):
        table = Stats()
        for k in powers_of_two(rollouts_per_example):
            values = [estimator(n, c, k) for n, c in counts if n >= k]
            if values:
                table[str(k)] = _share(values)
        found[name] = table
    return found


def _share(values: Sequence[float]) -> Stats:
    estimate = mean_over_tasks([[value] for value in values], SHARE)
    assert estimate is not None, "the caller has at least one task"
    interval = list(estimate.interval) if estimate.interval else None
    return Stats(mean=estimate.mean, standard_error=estimate.standard_error, interval=interval, num_tasks=len(values))


def _metrics(tasks: Iterable[Sequence[RolloutFacts]]) -> Stats:
    clusters: dict[str, list[list[float]]] = {}
    for task in tasks:
        here: dict[str, list[float]] = {}
        for facts in task:
            if facts.reward is not None:
                for name, value in facts.metrics.items():
                    here.setdefault(name, []).append(value)
        for name, values in here.items():
            clusters.setdefault(name, []).append(values)
    return Stats({name: _mean(groups, name) for name, groups in clusters.items()})


def _groups(rewards: Sequence[Sequence[float]]) -> Stats:
    """How much the rollouts of one task differ: without a difference, reinforcement learning has no signal."""
    spreads = [seen.std for task in rewards if (seen := spread(task)) is not None and seen.std is not None]
    return Stats(
        num_groups=len(spreads),
        share_without_variance=_rate(sum(std <= 1e-9 for std in spreads), len(spreads)),
        mean_std=mean_of(spreads) if spreads else None,
    )


def _errors(rollouts: Sequence[RolloutFacts]) -> Stats:
    failed = [facts for facts in rollouts if facts.cause is not None]
    causes: dict[str, list[RolloutFacts]] = {}
    for facts in failed:
        causes.setdefault(str(facts.cause), []).append(facts)
    ordered = sorted(causes.items(), key=lambda entry: (-len(entry[1]), entry[0]))
    return Stats(
        num=len(failed),
        rate=_rate(len(failed), len(rollouts)),
        by_cause=Stats(
            {
                cause: Stats(
                    num=len(group),
                    rate=_rate(len(group), len(rollouts)),
                    types=Stats(Counter(str(facts.error_type) for facts in group)),
                    first_message=group[0].error_message,
                )
                for cause, group in ordered
            }
        ),
    )


def _tokens(rollouts: Sequence[RolloutFacts]) -> Stats | None:
    counted = [facts for facts in rollouts if facts.output_tokens is not None]
    if not counted:
        return None
    return Stats(
        input=sum(facts.input_tokens or 0.0 for facts in counted),
        output=sum(facts.output_tokens or 0.0 for facts in counted),
        num_rollouts=len(counted),
        input_per_rollout=_profile([facts.input_tokens or 0.0 for facts in counted]),
        output_per_rollout=_profile([facts.output_tokens or 0.0 for facts in counted]),
    )


def _cost(rollouts: Sequence[RolloutFacts], price: Price | None) -> Stats | None:
    """What all rollouts cost; None when the price, or the tokens of a rollout that ended well, are not known."""
    if price is None or any(facts.output_tokens is None and facts.cause is None for facts in rollouts):
        return None
    counted = [facts for facts in rollouts if facts.output_tokens is not None]
    if not counted:
        return None
    read, written = (sum(getattr(f, name) or 0.0 for f in counted) for name in ("input_tokens", "output_tokens"))
    cost = price.cost(read, written)
    return Stats(**cost, usd_per_rollout=cost["total_usd"] / len(rollouts))


def _profile(values: Sequence[float]) -> Stats | None:
    if not values:
        return None
    ordered = sorted(values)
    quantiles = {name: percentile(ordered, q) for name, q in PERCENTILES}
    return Stats(mean=mean_of(ordered), **quantiles, max=ordered[-1])


def _rate(count: int, total: int) -> float | None:
    return count / total if total else None


def plain(value: Any) -> Any:
    """Statistics as plain dicts and lists."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value
