"""The unit test of a reward: no model, answers made from the data.

    rows          some of the environment's, with their right answers
    layout        how an answer has to look: the one in which the right answers earn most
    cases         right, wrong, void and odd answers to each row
    trials        each scored twice, the second time in the opposite order
    checks        what the rewards must obey

Parts: `RewardReport`, `run_reward_test`, `members_of`. An environment whose right answers cannot
be said in one text (a game, tools) shows them: `demonstrate=`, or a `demonstration` column. Invariant: where no right
answer can be made the report is `untested`, never `pass`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mettle.errors import UserError
from mettle.evals.passing import PassRule
from mettle.quality.checks import Check, Status, worst
from mettle.quality.rewards.cases import (
    MEANING,
    Case,
    data_cases,
    shown_cases,
    source_of_cases,
    void_cases,
)
from mettle.quality.rewards.golds import Gold, asks_for_order, gold_values, labels_of
from mettle.quality.rewards.judges import StandInJudge, standing_in
from mettle.quality.rewards.layouts import LAYOUTS, AnswerLayout, asked_for, layouts_for, prompt_text
from mettle.quality.rewards.scripts import Policy
from mettle.quality.rewards.trials import Trials
from mettle.quality.rewards.verdicts import (
    GOLD_PASSES,
    NOTHING_WRONG_PASSES,
    Tried,
    by_kind,
    mean_reward,
    pass_checks,
    reward_checks,
)
from mettle.quality.settings import PRESETS, RewardTestOptions

NUM_KNOWN_ROWS = 200
"""Rows whose answers are read, to know what the other answers look like."""
NUM_CALIBRATION_ROWS = 3
GAME_FACTOR = 4
"""So many times the rows are tried where right answers are shown and none is stated."""


@dataclass(frozen=True, slots=True)
class Basis:
    """What the answers were made from: the rows read, their right answers ("" for none), how to write them."""

    rows: list[dict[str, Any]]
    golds: list[str]
    labels: tuple[str, ...]
    layout: AnswerLayout

    def gold(self, index: int) -> Gold | None:
        """The right answer of a row among the others; None for a row without one."""
        if not self.golds[index]:
            return None
        others = tuple(gold for at, gold in enumerate(self.golds) if at != index and gold)
        return Gold(self.golds[index], others, self.labels, asks_for_order(prompt_text(self.rows[index])))


@dataclass(slots=True)
class RewardReport:
    """What came of it. `source`: where the answers are from."""

    env_id: str
    kind: str
    source: str = "data"
    layout: str | None = None
    num_rows: int = 0
    tried: list[Tried] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    basis: Basis | None = None

    @property
    def status(self) -> Status:
        """The worst of the checks."""
        return worst(self.checks)

    def table(self) -> list[dict[str, Any]]:
        """Kinds of answers and what they earned."""
        return [_kind_row(kind, members) for kind, members in by_kind(self.tried).items()]

    def to_dict(self) -> dict[str, Any]:
        """As JSON wants it."""
        return {
            "env_id": self.env_id,
            "kind": self.kind,
            "status": self.status,
            "source": self.source,
            "layout": self.layout,
            "num_rows": self.num_rows,
            "kinds": self.table(),
            "checks": [each.to_dict() for each in self.checks],
            "notes": self.notes,
        }


def members_of(env: Any) -> list[Any]:
    """The environments of a group, else the environment itself."""
    env_map = getattr(env, "env_map", None)
    if not isinstance(env_map, Mapping):
        return [env]
    for name, member in env_map.items():
        member.env_id = member.env_id or name
    return [inner for member in env_map.values() for inner in members_of(member)]


def run_reward_test(env: Any, options: RewardTestOptions | None = None, custom: Sequence[Any] = ()) -> RewardReport:
    """Test the reward of one environment (not of a group). `custom`: tests of `custom.read_custom_tests`.

    Raises: UserError for a preset that the environment cannot have.
    """
    options = options or RewardTestOptions()
    report = RewardReport(env.env_id or type(env).__name__, type(env).__name__)
    try:
        known = all_rows(env, NUM_KNOWN_ROWS, options.seed)
    except Exception as error:  # the environment's own code, which may do anything
        report.checks.append(Check("rows", "fail", f"they cannot be read: {type(error).__name__}: {error}"[:300]))
        return report
    if not known:
        report.checks.append(Check("rows", "fail", "the dataset is empty", "give it rows"))
        return report
    judge = StandInJudge()
    with standing_in(env.rubric, judge) as num_judges, Trials(env, timeout_s=options.timeout_s) as trials:
        _try_rows(report, trials, known, options, judge)
        for test in custom:
            report.checks.append(test.run(trials))
    if num_judges:
        report.notes.append("the judge was a stand-in that says yes to what holds the right answer, and no to the rest")
    return report


def all_rows(env: Any, num_rows: int, seed: int) -> list[dict[str, Any]]:
    """Some rows: of the evaluation split first, then of the training split."""
    found: list[dict[str, Any]] = []
    for rows in (env.eval_dataset, env.dataset):
        if rows is not None and len(found) < num_rows:
            shuffled = rows.shuffle(seed=seed) if len(rows) > num_rows else rows
            found += shuffled.take(num_rows - len(found))
    return found


def _try_rows(
    report: RewardReport, trials: Trials, known: list[dict[str, Any]], options: RewardTestOptions, judge: StandInJudge
) -> None:
    rows = known[: options.num_rows]
    basis = report.basis = _basis(trials, known, rows, options)
    if basis is None:  # a game of chance, perhaps, in which the right play wins only on average
        rows = known[: options.num_rows * GAME_FACTOR]
    report.num_rows = len(rows)
    judge.golds = {gold for gold in basis.golds if gold} if basis else set()
    cases: list[Case] = []
    for index, row in enumerate(rows):
        shown = list(shown_cases(trials.env, index, rows))
        gold = basis.gold(index) if basis else None
        cases += shown
        if basis is not None and gold is not None:
            is_single = getattr(trials.env, "max_turns", 1) == 1
            cases += data_cases(index, gold, basis.layout, has_gold=bool(shown), is_single=is_single)
        cases += void_cases(index, row)
    report.source = source_of_cases(cases)
    if report.source == "nothing":
        report.checks.append(_no_gold())
        return
    report.layout = basis.layout.name if basis else None
    report.tried = _try_twice(trials, rows, cases)
    low, high = options.reward_range or range_of_weights(trials.env.rubric)
    report.checks += reward_checks(report.tried, (low, high), options.timeout_s, by_mean=basis is None)
    if basis is not None and not trials.is_group:
        rule = PassRule(trials.env.pass_threshold, trials.env.pass_on)
        report.checks += pass_checks(report.tried, rule)
    _explain(report, trials.env, rows)


def _basis(
    trials: Trials, known: list[dict[str, Any]], rows: list[dict[str, Any]], options: RewardTestOptions
) -> Basis | None:
    """The right answers and how to write them; None when the rows that are tried state none."""
    readings = [gold_values(row) for row in known]
    if not any(readings[: len(rows)]):
        return None
    layout, reading = find_layout(trials, rows, readings, _layouts(trials.env, rows, options.preset))
    golds = [values[min(reading, len(values) - 1)] if values else "" for values in readings]
    return Basis(known, golds, labels_of(golds), layout)


def _layouts(env: Any, rows: Sequence[Mapping[str, Any]], preset: str | None) -> list[AnswerLayout]:
    layouts = layouts_for(env.parser, rows)
    if preset is None:
        return layouts
    chosen = [layout for layout in layouts if layout.name == PRESETS[preset]]
    if not chosen:
        raise UserError(f"the preset {preset!r} needs an XML parser; this environment's is {type(env.parser).__name__}")
    return chosen


def find_layout(
    trials: Trials,
    rows: Sequence[Mapping[str, Any]],
    readings: Sequence[Sequence[str]],
    layouts: Sequence[AnswerLayout],
) -> tuple[AnswerLayout, int]:
    """The layout, and the reading of the answer column, in which right answers earn most; the first among equals."""
    sample = [(row, values) for row, values in zip(rows, readings, strict=False) if values][:NUM_CALIBRATION_ROWS]
    best, chosen = float("-inf"), (layouts[0], 0)
    goal = range_of_weights(trials.env.rubric)[1]
    for reading in range(max(len(values) for _, values in sample)):
        for layout in layouts:
            earned = [
                trials.try_one(row, layout.write(values[min(reading, len(values) - 1)])).reward
                for row, values in sample
            ]
            mean = sum(reward for reward in earned if reward is not None) / len(earned)
            if None not in earned and mean > best + 1e-9:
                best, chosen = mean, (layout, reading)
            if best >= goal - 1e-9:
                return chosen
    return chosen


def range_of_weights(rubric: Any) -> tuple[float, float]:
    """What the reward can be when each function gives -1 to 1, or 0 to 1."""
    total = sum(abs(weight) for weight in rubric.get_reward_weights())
    return -total, total


def _try_twice(trials: Trials, rows: Sequence[Mapping[str, Any]], cases: Sequence[Case]) -> list[Tried]:
    """The second time in the opposite order, so that what a reward function keeps between rollouts shows."""
    by_row: dict[int, list[Case]] = {}
    for case in cases:
        by_row.setdefault(case.row_index, []).append(case)
    first = {
        id(case): outcome
        for index, members in by_row.items()
        for case, outcome in zip(members, trials.try_each(rows[index], _policies(members)), strict=True)
    }
    tried = []
    for index, members in reversed(by_row.items()):
        backwards = members[::-1]
        for case, outcome in zip(backwards, trials.try_each(rows[index], _policies(backwards)), strict=True):
            tried.append(Tried(case, first[id(case)], outcome))
    return tried[::-1]


def _policies(cases: Sequence[Case]) -> list[Policy]:
    return [case.policy for case in cases]


def _explain(report: RewardReport, env: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Say when it is not the reward that failed but the making of a right answer; and when the prompt misleads."""
    if report.source != "data":
        return
    failed = next((each for each in report.checks if each.name == "gold above wrong"), None)
    is_single = getattr(env, "max_turns", 1) == 1
    if failed is not None and failed.status == "fail" and not is_single:
        reason = "its right answer, said in every turn, earns no more than a wrong one; it takes several turns or tools"
        about_gold = ("gold above wrong", NOTHING_WRONG_PASSES, GOLD_PASSES)
        report.checks = [_no_gold(reason), *(each for each in report.checks if each.name not in about_gold)]
    asked = asked_for(rows)
    if asked is not None and report.layout not in (asked, "xml") and report.layout in LAYOUTS:
        detail = f"the prompt asks for {asked}; right answers earn most as {report.layout}"
        fix = "read the answer where the prompt asks for it"
        report.checks.append(Check("format asked for is read", "warn", detail, fix))


def _no_gold(reason: str = "the rows state no right answer") -> Check:
    fix = "show right answers: `demonstrate=` or a `demonstration` column; or write tests: --custom tests.json"
    return Check("gold above wrong", "untested", reason, fix)


def _kind_row(kind: str, members: Sequence[Tried]) -> dict[str, Any]:
    rewards = [each.first.reward for each in members if each.first.reward is not None]
    return {
        "kind": kind,
        "family": members[0].case.family,
        "num": len(members),
        "mean": mean_reward(members),
        "min": min(rewards, default=None),
        "max": max(rewards, default=None),
        "errors": sum(each.first.reward is None for each in members),
        "meaning": MEANING.get(kind, ""),
    }
