"""A quality card as Markdown: `QUALITY.md` of a package.

Parts: `card_markdown`, `rules_markdown` (the reference page of the rules). Invariant: the text depends on what was
found alone, so that writing it again without a change changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mettle.quality.card import QualityCard
from mettle.quality.checks import Check
from mettle.quality.lint.rules import RULES, Rule

MARKS = {"pass": "pass", "skip": "-", "warn": "warn", "untested": "**untested**", "fail": "**fail**"}
HOW = {
    "source": "read off the source",
    "trial": "found by scoring answers, without a model",
    "data": "found in the rows",
}


def card_markdown(card: QualityCard) -> str:
    """The card."""
    lines = [f"# Quality of {card.name} {card.version}", "", f"Result: {MARKS[card.status]}", ""]
    lines += [f"Made by `mettle env check {card.name} --write`; do not edit.", ""]
    for section, checks in card.sections.items():
        lines += [f"## {section.capitalize()}", "", *_table(("check", "result", "found"), map(_check_row, checks)), ""]
    for report in card.rewards:
        if report.tried:
            layout = f", written as {report.layout}" if report.layout else ""
            lines += [f"## Answers tried on {report.env_id}", ""]
            lines += [f"{report.num_rows} rows, right answers from {report.source}{layout}.", ""]
            head = ("answer", "tried", "mean", "least", "most", "what it is")
            lines += [*_table(head, map(_kind_row, report.table())), ""]
            lines += [f"Note: {note}." for note in report.notes]
    if card.lint.findings:
        lines += ["## Findings", ""]
        rows = [
            (f"`{f.rule.id}`", f.rule.severity, f"{f.file}:{f.line}", f.what, f.allowed or "no")
            for f in card.lint.findings
        ]
        lines += [*_table(("rule", "severity", "where", "what", "allowed"), rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def rules_markdown(note: str) -> str:
    """The reference page of the lint rules."""
    lines = [note, "", "# Lint rules", ""]
    lines += [
        "`mettle env check` holds an environment to these rules. An error fails the check, a warning does not.",
        "",
        "A comment on the line of the finding, on the line above it, or at the `def` of the function around it",
        "suppresses a rule there; the reason is required, and shown:",
        "",
        "    # mettle: allow[gold-substring] answers are whole sentences of the source",
        "",
        "For a finding by trying, the function is the reward function that paid. Where the source is not yours,",
        'pyproject.toml excuses the environment: `[tool.mettle.quality.allow]` with `rule = "reason"`.',
        "",
    ]
    for rule in RULES.values():
        lines += _rule(rule)
    return "\n".join(lines).rstrip() + "\n"


def _rule(rule: Rule) -> list[str]:
    return [
        f"## {rule.id}",
        "",
        f"{rule.severity.capitalize()}, {HOW[rule.how]}: {rule.what}.",
        "",
        f"Why: {rule.why}.",
        "",
        f"Fix: {rule.fix}.",
        "",
    ]


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    names = list(head)
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    return lines + [f"| {' | '.join(_cell(each) for each in row)} |" for row in rows]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def _check_row(check: Check) -> tuple[str, str, str]:
    return check.name, MARKS[check.status], f"{check.detail}. {check.fix}" if check.fix else check.detail


def _kind_row(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kind"], row["num"], row["mean"], row["min"], row["max"], row["meaning"]
