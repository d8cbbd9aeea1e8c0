"""The quality card of an environment: everything that can be checked without a model, and its baseline if there is one.

    package      metadata, README, its own tests
    data         size, duplicates, leakage between the splits
    reward       the unit test of the reward, of each environment of a group
    lint         rules against rewards that can be had without the answer
    baseline     the distribution of the newest saved evaluation

Parts: `QualityCard`, `make_card`. Invariant: a card is `pass` only when nothing failed and nothing was left untried.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mettle.envs.packages.loading import load_environment, resolve_environment
from mettle.envs.packages.registry import EnvironmentEntry
from mettle.errors import MettleError, UserError
from mettle.quality.checks import Check, Status, worst
from mettle.quality.data.columns import as_text
from mettle.quality.data.overlap import find_overlap
from mettle.quality.data.report import overlap_checks
from mettle.quality.evaluations import distribution_checks, find_evaluation, read_distribution
from mettle.quality.lint.linter import LintReport, lint_environment, lint_source, source_of
from mettle.quality.packages import package_checks, run_package_tests
from mettle.quality.rewards.layouts import prompt_text
from mettle.quality.rewards.reward_test import RewardReport, members_of, run_reward_test
from mettle.quality.settings import QualitySettings, read_settings

MAX_ROWS = 20_000
TEST_TIMEOUT_S = 300.0
SECTIONS = ("package", "data", "reward", "lint", "baseline")


@dataclass(slots=True)
class QualityCard:
    """Checks by section, with the reports behind them."""

    name: str
    version: str
    description: str
    folder: Path | None
    sections: dict[str, list[Check]] = field(default_factory=dict)
    rewards: list[RewardReport] = field(default_factory=list)
    lint: LintReport = field(default_factory=LintReport)

    @property
    def checks(self) -> list[Check]:
        """All of them."""
        return [each for checks in self.sections.values() for each in checks]

    @property
    def status(self) -> Status:
        """The worst of the checks."""
        return worst(self.checks)

    @property
    def has_passed(self) -> bool:
        """Nothing failed, and what applies was tried."""
        return self.status not in ("fail", "untested")

    def to_dict(self) -> dict[str, Any]:
        """As JSON wants it."""
        return {
            "name": self.name,
            "version": self.version,
            "description": self.description,
            "folder": str(self.folder) if self.folder else None,
            "status": self.status,
            "has_passed": self.has_passed,
            "sections": {name: [each.to_dict() for each in checks] for name, checks in self.sections.items()},
            "rewards": [report.to_dict() for report in self.rewards],
            "lint": self.lint.to_dict(),
        }


def make_card(
    name: str,
    env_args: dict[str, Any] | None = None,
    *,
    is_testing: bool = True,
    test_timeout_s: float = TEST_TIMEOUT_S,
    on_step: Callable[[str], None] = lambda step: None,
) -> QualityCard:
    """Check everything. `on_step` is told what is being done.

    Raises: UserError when there is no such environment.
    """
    entry = resolve_environment(name)
    settings = read_settings(entry.folder)
    card = QualityCard(entry.name, entry.version, entry.description, entry.folder)
    on_step("loading")
    try:
        env = load_environment(name, **(env_args or {}))
    except (MettleError, RuntimeError, ValueError) as error:
        return _unloaded(card, entry, error)
    on_step("package")
    card.sections["package"] = [Check("loads", "pass", type(env).__name__)]
    card.sections["package"] += package_checks(entry, _own_names(env.rubric), _arguments(entry))
    if is_testing:
        card.sections["package"].append(run_package_tests(entry.folder, test_timeout_s))
    on_step("data")
    card.sections["data"] = [_allowed(each, settings.allow) for each in _data_checks(env)]
    on_step("reward")
    _check_rewards(card, env, settings)
    on_step("lint")
    card.lint = lint_environment(source_of(entry), env, card.rewards, timeout_s=settings.timeout_s)
    card.lint.findings = [
        replace(finding, allowed=finding.allowed or settings.allow.get(finding.rule.id, ""))
        for finding in card.lint.findings
    ]
    card.sections["lint"] = [card.lint.to_check()]
    card.sections["baseline"] = _baseline(entry)
    return card


def _unloaded(card: QualityCard, entry: EnvironmentEntry, error: Exception) -> QualityCard:
    """What can be said of an environment that does not load: its source."""
    card.sections["package"] = [Check("loads", "fail", str(error).splitlines()[0][:300], "mend that first")]
    if entry.folder is not None:
        card.lint = lint_source(entry.folder)
        card.sections["lint"] = [card.lint.to_check()]
    return card


def _data_checks(env: Any) -> list[Check]:
    splits: dict[str, list[dict[str, Any]]] = {}
    try:
        for split, rows in (("train", env.dataset), ("eval", env.eval_dataset)):
            if rows is not None:
                splits[split] = list(rows.take(MAX_ROWS))
    except Exception as error:  # the environment's own code, which may do anything
        return [Check("dataset", "fail", f"{type(error).__name__}: {error}"[:300], "the rows cannot be read")]
    return overlap_checks(find_overlap(splits, _asked, lambda row: as_text(row.get("answer") or row.get("info"))))


def _allowed(each: Check, allow: Mapping[str, str]) -> Check:
    """A check that did not pass and is excused says why, and counts no longer."""
    if each.status in ("pass", "skip") or each.name not in allow:
        return each
    return Check(each.name, "skip", f"{each.detail}; allowed: {allow[each.name]}")


def _own_names(rubric: Any) -> list[str]:
    """Rewards and metrics that a README has to name: those with weight, and the environment's own."""
    funcs, weights = rubric.get_reward_funcs(), rubric.get_reward_weights()
    names = rubric.get_reward_func_names()
    if not len(funcs) == len(weights) == len(names):
        return list(names)
    return [
        name
        for name, func, weight in zip(names, funcs, weights, strict=True)
        if weight != 0 or not str(getattr(func, "__module__", "")).startswith("mettle.")
    ]


def _asked(row: Mapping[str, Any]) -> str:
    return prompt_text(row, roles=("user", "text"))


def _check_rewards(card: QualityCard, env: Any, settings: QualitySettings) -> None:
    members = members_of(env)
    checks: list[Check] = []
    for member in members:
        report = run_reward_test(member, settings)
        card.rewards.append(report)
        prefix = f"{report.env_id}: " if len(members) > 1 else ""
        checks += [replace(each, name=f"{prefix}{each.name}") for each in report.checks]
    card.sections["reward"] = checks


def _baseline(entry: EnvironmentEntry) -> list[Check]:
    root = entry.folder.parent.parent if entry.folder is not None else Path()
    for place in (Path(), root):
        try:
            folder = find_evaluation(entry.name, place)
        except UserError:
            continue
        found = read_distribution(folder)
        name = f"baseline {found.model}"
        return [replace(each, name=f"{name}: {each.name}") for each in distribution_checks(found)]
    how = f"measure one: mettle eval run {entry.name} -m MODEL -n 20 -r 4"
    return [Check("baseline", "skip", f"no saved evaluation; {how}")]


def _arguments(entry: EnvironmentEntry) -> list[str]:
    loader = getattr(sys.modules[entry.module], "load_environment", None)
    if loader is None:
        return []
    parameters = inspect.signature(loader).parameters.values()
    return [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
