"""What the rewards of tried answers must obey, as checks.

Parts: `Tried`, `reward_checks`; `pass_checks`, what may pass an evaluation's threshold. Invariant: a check looks at
rewards and metrics only; which answers were tried is decided elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mettle.evals.estimator import mean_of
from mettle.evals.passing import PassRule
from mettle.quality.checks import Check, check
from mettle.quality.rewards.cases import Case
from mettle.quality.rewards.trials import TrialOutcome

EPSILON = 1e-9
MARGIN = 0.1
"""A wrong answer has to earn so much less than the right one, as a share of what parts that from the worst answer."""
NOTHING_WRONG_PASSES, GOLD_PASSES = "nothing wrong passes", "right answers pass"
TOLERATED_SHARE = 0.2
"""Rows on which a wrong answer may by chance be right (`1/2` and `0.5`), as a share of the rows tried."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A case and what it earned, twice."""

    case: Case
    first: TrialOutcome
    second: TrialOutcome


def reward_checks(
    tried: Sequence[Tried], reward_range: tuple[float, float], timeout_s: float, *, by_mean: bool = False
) -> list[Check]:
    """Every check of the rewards. `by_mean`: a game, in which the right play may lose, is won on average only."""
    return [
        _above(tried, "wrong", "gold above wrong", by_mean),
        _above(tried, "void", "gold above nothing", by_mean),
        _differ(tried),
        _deterministic(tried),
        _no_errors(tried),
        _in_time(tried, timeout_s),
        _ends(tried),
        _in_range(tried, *reward_range),
    ]


def pass_checks(tried: Sequence[Tried], rule: PassRule) -> list[Check]:
    """No wrong answer passes, and right ones do: otherwise pass@k counts something else than right answers."""
    scored = [each for each in tried if each.first.reward is not None]
    golds = [each for each in scored if each.case.family == "gold"]
    wrong = [each for each in scored if each.case.family in ("wrong", "void")]
    if not golds or not wrong:
        return []
    passed = list(_passed(wrong, rule))
    fix = "compare whole answers, name the metric that says right or wrong (pass_on=), or raise pass_threshold"
    limit = f"{rule.what} of {rule.threshold:g}"
    checks = [check(NOTHING_WRONG_PASSES, not passed, "; ".join(passed) or f"at {limit}", fix)]
    num = sum(rule.holds(each.first) for each in golds)
    detail = f"{num} of {len(golds)} pass with {limit}"
    is_good = num >= (1 - TOLERATED_SHARE) * len(golds)
    fix = "set pass_threshold to what a right answer earns, or name the metric that says so (pass_on=)"
    return [*checks, check(GOLD_PASSES, is_good, detail, fix, otherwise="warn")]


def _passed(wrong: Sequence[Tried], rule: PassRule) -> Iterator[str]:
    for kind, members in by_kind(wrong).items():
        passing = [each for each in members if rule.holds(each.first)]
        if len(passing) > TOLERATED_SHARE * len(members):
            value, index = rule.correctness(passing[0].first), passing[0].case.row_index
            what = f"{rule.what} {value:.3g} on row {index}, {rule.threshold:g} passes"
            yield f"{kind} passes on {len(passing)} of {len(members)} rows ({what})"


def by_kind(tried: Sequence[Tried]) -> dict[str, list[Tried]]:
    """The tried answers by kind, in order of appearance."""
    found: dict[str, list[Tried]] = defaultdict(list)
    for each in tried:
        found[each.case.kind].append(each)
    return dict(found)


def mean_reward(tried: Sequence[Tried]) -> float | None:
    """The average of those that have a reward."""
    rewards = [each.first.reward for each in tried if each.first.reward is not None]
    return mean_of(rewards) if rewards else None


def _gold_of(tried: Sequence[Tried]) -> dict[int, float]:
    return {
        each.case.row_index: each.first.reward
        for each in tried
        if each.case.family == "gold" and each.first.reward is not None
    }


def _above(tried: Sequence[Tried], family: str, name: str, by_mean: bool) -> Check:
    """Gold earns more than each kind of `family`: on all but a tolerated share of the rows, or on average."""
    golds = _gold_of(tried)
    others = [each for each in tried if each.case.family == family]
    if not golds:
        return Check(name, "fail", "no right answer got a reward", "make the right answer score; see the errors")
    if all(each.first.reward is None for each in others):
        what = "none of them got a reward" if others else "no such answer could be made from the data"
        return Check(name, "untested", what, "write some: --custom tests.json")
    beaten = list(_beaten_on_average(golds, others) if by_mean else _beaten(golds, others, _least_of(tried)))
    if not beaten:
        least = mean_of(list(golds.values())) if by_mean else min(golds.values())
        how = "on average" if by_mean else "at least"
        return check(name, True, f"on {len(golds)} rows; gold earns {how} {least:.3g}")
    fix = "compare the whole parsed answer with the right one" if family == "wrong" else "give nothing for no answer"
    return Check(name, "fail", "; ".join(beaten), fix)


def _beaten(golds: dict[int, float], others: Sequence[Tried], least: dict[int, float]) -> Iterator[str]:
    for kind, members in by_kind(others).items():
        scored = [each for each in members if each.first.reward is not None and each.case.row_index in golds]
        close = [each for each in scored if _is_close(each, golds, least)]
        if len(close) > TOLERATED_SHARE * len(scored):
            first = next((each for each in close if _is_tie(each, golds)), close[0])
            reward, index = first.first.reward, first.case.row_index
            how = "as much as gold" if _is_tie(first, golds) else "nearly as much as gold"
            rows = f"{len(close)} of {len(scored)} rows"
            yield f"{kind} earns {how} on {rows} ({reward:.3g} against {golds[index]:.3g} on row {index})"


def _is_tie(each: Tried, golds: dict[int, float]) -> bool:
    return (each.first.reward or 0.0) >= golds[each.case.row_index] - EPSILON


def _is_close(each: Tried, golds: dict[int, float], least: dict[int, float]) -> bool:
    gold = golds[each.case.row_index]
    return (each.first.reward or 0.0) > gold - MARGIN * (gold - least[each.case.row_index]) - EPSILON


def _least_of(tried: Sequence[Tried]) -> dict[int, float]:
    """What the worst answer to each row earned."""
    found: dict[int, float] = {}
    for each in tried:
        if each.first.reward is not None:
            found[each.case.row_index] = min(each.first.reward, found.get(each.case.row_index, each.first.reward))
    return found


def _beaten_on_average(golds: dict[int, float], others: Sequence[Tried]) -> Iterator[str]:
    for kind, members in by_kind(others).items():
        scored = [each for each in members if each.first.reward is not None and each.case.row_index in golds]
        if not scored:
            continue
        mean = mean_of([each.first.reward or 0.0 for each in scored])
        gold = mean_of([golds[each.case.row_index] for each in scored])
        if mean >= gold - EPSILON:
            yield f"{kind} earns as much as gold on average ({mean:.3g} against {gold:.3g} on {len(scored)} rows)"


def _differ(tried: Sequence[Tried]) -> Check:
    rewards = [each.first.reward for each in tried if each.first.reward is not None]
    spread = max(rewards) - min(rewards) if rewards else 0.0
    detail = f"from {min(rewards):.3g} to {max(rewards):.3g}" if rewards else "there are no rewards"
    if rewards and spread <= EPSILON:
        detail = f"every answer earns {rewards[0]:.3g}"
    return check("not all equal", spread > EPSILON, detail, "a reward that is always the same teaches nothing")


def _deterministic(tried: Sequence[Tried]) -> Check:
    for each in tried:
        one, other = each.first.reward, each.second.reward
        if (one is None) != (other is None) or abs((one or 0.0) - (other or 0.0)) > EPSILON:
            said = [f"{reward:.4g}" if reward is not None else "an error" for reward in (one, other)]
            detail = f"{each.case.kind} on row {each.case.row_index} earned {said[0]}, then {said[1]}"
            return Check("deterministic", "fail", detail, "seed what is random; keep nothing between rollouts")
    return check("deterministic", True, f"{len(tried)} answers earned the same twice")


def _no_errors(tried: Sequence[Tried]) -> Check:
    failed = [each for each in tried if each.first.error and not each.first.is_timeout and not each.first.is_endless]
    if not failed:
        return check("no errors", True, f"{sum(not each.first.error for each in tried)} answers were scored")
    kinds = ", ".join(dict.fromkeys(each.case.kind for each in failed))
    detail = f"{len(failed)} of {len(tried)} answers ({kinds}): {failed[0].first.error[:200]}"
    return Check("no errors", "fail", detail, "a reward function must have a number for every answer")


def _in_time(tried: Sequence[Tried], timeout_s: float) -> Check:
    slow = [each for each in tried if each.first.is_timeout or each.second.is_timeout]
    if slow:
        kinds = ", ".join(dict.fromkeys(each.case.kind for each in slow))
        return Check("in time", "fail", f"{kinds}: no end within {timeout_s:g} s", "bound the work for each answer")
    longest = max((each for each in tried), key=lambda each: each.first.seconds, default=None)
    if longest is None:
        return Check("in time", "untested", "nothing was tried")
    bound = next((limit for limit in (0.01, 0.1, 1.0) if longest.first.seconds <= limit), timeout_s)
    return check("in time", True, f"each within {bound:g} s")


def _ends(tried: Sequence[Tried]) -> Check:
    endless = [each for each in tried if each.first.is_endless]
    kinds = ", ".join(dict.fromkeys(each.case.kind for each in endless))
    detail = f"{kinds}: {endless[0].first.error}" if endless else "every rollout came to its end"
    return check("ends", not endless, detail, "give the environment max_turns", otherwise="warn")


def _in_range(tried: Sequence[Tried], low: float, high: float) -> Check:
    outside = [
        each
        for each in tried
        if each.first.reward is not None and not low - EPSILON <= each.first.reward <= high + EPSILON
    ]
    if not outside:
        return check("in range", True, f"within {low:g} to {high:g}")
    worst = max(outside, key=lambda each: abs(each.first.reward or 0.0))
    detail = (
        f"{worst.case.kind} on row {worst.case.row_index} earned {worst.first.reward:.4g}, outside {low:g} to {high:g}"
    )
    fix = "scale each function to 0..1, or state the range under [tool.mettle.quality] reward_range = [low, high]"
    return Check("in range", "fail", detail, fix)
