"""Rules that are found by trying: what an answer earns that nobody should be paid for.

Parts: `Probe`, `probe_rewards`, `data_rules`. A finding stands at the reward function that paid, so an allow comment at
that function suppresses it. Invariant: a probe needs a right answer that scores; without one it says nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mettle.envs.errors import ModelError
from mettle.envs.rubrics.function import func_name
from mettle.evals.estimator import mean_of
from mettle.quality.lint.rules import RULES, LintFinding
from mettle.quality.lint.source import Module
from mettle.quality.rewards.layouts import user_text
from mettle.quality.rewards.reward_test import Basis, RewardReport
from mettle.quality.rewards.trials import TrialOutcome, Trials
from mettle.quality.rewards.verdicts import EPSILON, by_kind, mean_reward

EMPTY_SHARE = 0.1
FORMAT_SHARE = 0.5
LISTING_SHARE = 0.6
LISTING_MARGIN = 0.2
"""How much more a list must earn than one answer said to all rows, so that a lucky constant is no finding."""
MAX_LISTED_CHARS = 20_000
NUM_PROBED_ROWS = 8
LENGTHS = (1, 10, 100, 1000)
PROMPT_SHARE = 0.8
MIN_PROMPT_ROWS = 5


@dataclass(frozen=True, slots=True)
class Probe:
    """What probes look at: the modules, the environment, the report of its reward test."""

    modules: Sequence[Module]
    env: Any
    report: RewardReport

    @property
    def gold(self) -> float:
        """What right answers earn on average."""
        return mean_reward([each for each in self.report.tried if each.case.family == "gold"]) or 0.0

    def finding(self, rule: str, what: str, outcome: TrialOutcome | None = None) -> LintFinding:
        """A finding at the function that paid."""
        module, name, line = self._place(outcome)
        if module is None:
            return LintFinding(RULES[rule], name, line, what)
        return module.finding(RULES[rule], line, what)

    def at_loader(self, rule: str, what: str) -> LintFinding:
        """A finding at `load_environment`."""
        for module in self.modules:
            for function in module.functions:
                if function.node.name == "load_environment":
                    return module.finding(RULES[rule], function.node.lineno, what)
        return LintFinding(RULES[rule], self.modules[0].name if self.modules else "", 1, what)

    def _place(self, outcome: TrialOutcome | None) -> tuple[Module | None, str, int]:
        rubric = self.env.rubric
        weighted = [
            func
            for func, weight in zip(rubric.get_reward_funcs(), rubric.get_reward_weights(), strict=False)
            if weight != 0
        ]
        paid = [func for func in weighted if outcome is not None and outcome.metrics.get(func_name(func), 0.0) > 0]
        for func in (*paid, *weighted):
            code = getattr(func, "__code__", None)
            module = self._module(code.co_filename) if code is not None else None
            if module is not None and code is not None:
                return module, module.name, _def_line(module, code.co_firstlineno)
        return None, self.modules[0].name if self.modules else "", 1

    def _module(self, filename: str) -> Module | None:
        path = Path(filename).resolve()
        return next((module for module in self.modules if module.path.resolve() == path), None)


def probe_rewards(probe: Probe, *, timeout_s: float) -> list[LintFinding]:
    """All findings by trying. Only what earns against a right answer that scores counts."""
    findings = list(_from_report(probe))
    basis = probe.report.basis
    if basis is not None and probe.gold > EPSILON and probe.report.tried:
        with Trials(probe.env, timeout_s=timeout_s) as trials:
            for search in (_listing, _case_or_space, _length_only, _broken_group):
                findings += search(probe, basis, trials)
    return findings


def data_rules(probe: Probe) -> Iterator[LintFinding]:
    """`gold-in-prompt`: most prompts hold their right answer, which is none of a few choices."""
    basis = probe.report.basis
    if basis is None or basis.labels:
        return
    pairs = [
        (user_text(row), gold)
        for row, gold in zip(basis.rows, basis.golds, strict=True)
        if len(gold) > 1 and not _has_choices(row)
    ]
    if len({gold for _, gold in pairs}) < MIN_PROMPT_ROWS:
        return
    holding = [pair for pair in pairs if re.search(rf"(?<!\w){re.escape(pair[1])}(?!\w)", pair[0])]
    if len(holding) >= PROMPT_SHARE * len(pairs):
        what = f"{len(holding)} of {len(pairs)} prompts hold the right answer, as {holding[0][1][:40]!r}"
        yield probe.at_loader("gold-in-prompt", what)


def _from_report(probe: Probe) -> Iterator[LintFinding]:
    kinds = by_kind(probe.report.tried)
    for kind in ("empty", "whitespace"):
        earned = mean_reward(kinds.get(kind, []))
        if earned is not None and earned > max(EPSILON, EMPTY_SHARE * probe.gold):
            what = f"{kind} output earns {earned:.3g} on average; gold earns {probe.gold:.3g}"
            yield probe.finding("empty-output", what, kinds[kind][0].first)
            break
    nonsense = mean_reward(kinds.get("nonsense", []))
    if nonsense is not None and FORMAT_SHARE * probe.gold < nonsense < probe.gold - EPSILON:
        what = f"nonsense in the format earns {nonsense:.3g}; gold earns {probe.gold:.3g}"
        yield probe.finding("format-pays", what, kinds["nonsense"][0].first)
    unlike = next((check for check in probe.report.checks if check.name == "deterministic"), None)
    if unlike is not None and unlike.status == "fail":
        yield probe.finding("non-deterministic", unlike.detail, probe.report.tried[0].first)


def _listing(probe: Probe, basis: Basis, trials: Trials) -> Iterator[LintFinding]:
    """One text with every answer in it, said to each row."""
    answers = list(basis.labels) or sorted({gold for gold in basis.golds if gold})
    rows = [(row, gold) for row, gold in zip(basis.rows, basis.golds, strict=True) if gold][:NUM_PROBED_ROWS]
    counts = Counter(gold for _, gold in rows)
    if len(counts) < 2 or sum(map(len, answers)) > MAX_LISTED_CHARS:
        return
    constant = counts.most_common(1)[0][1] / len(rows)
    alone = [trials.try_one(row, basis.layout.write(a)).reward for a in (answers[0], answers[-1]) for row, _ in rows]
    half = len(alone) // 2
    constant = max(
        constant, *(sum(r or 0.0 for r in part) / half / probe.gold for part in (alone[:half], alone[half:]))
    )
    texts = {
        "a list": basis.layout.write(", ".join(answers)),
        "an answer each": "\n".join(basis.layout.write(answer) for answer in answers),
    }
    for how, text in texts.items():
        outcomes = [trials.try_one(row, text) for row, _ in rows]
        earned = mean_of([outcome.reward or 0.0 for outcome in outcomes])
        if earned >= LISTING_SHARE * probe.gold and earned > (constant + LISTING_MARGIN) * probe.gold:
            what = f"all {len(answers)} answers at once ({how}) earn {earned:.3g}; gold earns {probe.gold:.3g}"
            yield probe.finding("answer-listing", what, max(outcomes, key=lambda each: each.reward or 0.0))
            return


def _case_or_space(probe: Probe, basis: Basis, trials: Trials) -> Iterator[LintFinding]:
    """The right answer with space around it; among few words, in another case too (a letter is shown as meant)."""
    if _is_noisy(probe):
        return
    folded = {label.casefold() for label in basis.labels}
    changes: dict[str, Callable[[str], str]] = {"a line end after it": lambda gold: f"{gold}\n"}
    if len(folded) == len(basis.labels) and any(len(label) > 1 for label in basis.labels):
        changes["another case"] = str.swapcase
    for how, change in changes.items():
        for row, gold in list(zip(basis.rows, basis.golds, strict=True))[:NUM_PROBED_ROWS]:
            if not gold or change(gold) == gold:
                continue
            right = trials.try_one(row, basis.layout.write(gold))
            other = trials.try_one(row, basis.layout.write(change(gold)))
            if right.reward is not None and (other.reward or 0.0) < right.reward - EPSILON:
                what = f"{gold[:40]!r} earns {right.reward:.3g}, with {how} {other.reward or 0.0:.3g}"
                yield probe.finding("case-or-space", what, right)
                break


def _is_noisy(probe: Probe) -> bool:
    """Whether one answer earned two rewards, so that a difference between two answers says nothing."""
    return any(check.name == "deterministic" and check.status == "fail" for check in probe.report.checks)


def _length_only(probe: Probe, basis: Basis, trials: Trials) -> Iterator[LintFinding]:
    """Different words of one length earn the same, whatever the length; and another length earns something else."""
    earned: list[float] = []
    row, gold = next((r, g) for r, g in zip(basis.rows, basis.golds, strict=True) if g)
    texts = [(gold, re.sub(r"\w", "q", gold))]
    texts += [(" ".join(["ab"] * n), " ".join(["zq"] * n)) for n in LENGTHS]
    for one, other in texts:
        outcomes = [trials.try_one(row, basis.layout.write(text)) for text in (one, other)]
        rewards = [outcome.reward for outcome in outcomes]
        if rewards[0] is None or rewards[1] is None or abs(rewards[0] - rewards[1]) > EPSILON:
            return
        earned.append(rewards[0])
    if max(earned) - min(earned) > EPSILON:
        lengths = ", ".join(f"{n} words {reward:.3g}" for n, reward in zip(LENGTHS, earned[1:], strict=True))
        yield probe.finding("length-only", f"whatever the words: {lengths}", trials.try_one(row, texts[-1][0]))


def _broken_group(probe: Probe, basis: Basis, trials: Trials) -> Iterator[LintFinding]:
    """A group in which one rollout fails gives the others what they earn without it."""
    if not trials.is_group:
        return
    row, gold = next((r, g) for r, g in zip(basis.rows, basis.golds, strict=True) if g)
    right, wrong = basis.layout.write(gold), basis.layout.write("")

    def fail(_: Any) -> str:
        raise ModelError("the model is down")

    whole = trials.try_group(row, [right, wrong, right, wrong])
    if any(outcome.reward is None for outcome in whole):
        return
    broken = trials.try_group(row, [right, wrong, right, fail])[:3]
    lost = [outcome for outcome in broken if outcome.reward is None]
    if lost:
        what = f"with one of four rollouts failed, {len(lost)} of the others have no reward: {lost[0].error[:120]}"
        yield probe.finding("group-ignores-errors", what, whole[0])


def _has_choices(row: dict[str, Any]) -> bool:
    info = row.get("info")
    return "choices" in row or (isinstance(info, dict) and "choices" in info)


def _def_line(module: Module, first_line: int) -> int:
    """The line of `def`, below the decorators."""
    for function in module.functions:
        node = function.node
        if min([node.lineno, *(each.lineno for each in node.decorator_list)]) == first_line:
            return node.lineno
    return first_line
