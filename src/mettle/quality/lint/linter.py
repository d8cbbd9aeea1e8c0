"""All rules over one environment.

Parts: `LintReport`, `lint_source`, `lint_environment`. Invariant: what an allow comment suppresses is reported with its
reason; it does not fail the check.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mettle.envs.packages.registry import EnvironmentEntry
from mettle.quality.checks import Check, check
from mettle.quality.lint.conduct import conduct_rules, module_rules
from mettle.quality.lint.execution import execution_rules
from mettle.quality.lint.matching import matching_rules
from mettle.quality.lint.probes import Probe, data_rules, probe_rewards
from mettle.quality.lint.rules import LintFinding
from mettle.quality.lint.source import Module, read_modules, scoring_functions
from mettle.quality.rewards.reward_test import RewardReport
from mettle.wording import count


@dataclass(slots=True)
class LintReport:
    """Findings, those that are allowed included."""

    findings: list[LintFinding] = field(default_factory=list)
    num_files: int = 0
    num_functions: int = 0
    was_tried: bool = False

    @property
    def open_findings(self) -> list[LintFinding]:
        """Findings that nobody has allowed."""
        return [finding for finding in self.findings if not finding.allowed]

    def to_check(self) -> Check:
        """The lint as one check."""
        found = self.open_findings
        errors = [finding for finding in found if finding.rule.severity == "error"]
        read = f"{count(self.num_functions, 'function')} in {count(self.num_files, 'file')}"
        if not found:
            return check(
                "lint", True, f"no findings in {read}" + ("" if self.was_tried else "; nothing could be tried")
            )
        names = ", ".join(dict.fromkeys(finding.rule.id for finding in found))
        fix = "see the findings; allow one with `# mettle: allow[rule] reason`"
        return Check("lint", "fail" if errors else "warn", f"{len(found)} findings: {names}", fix)

    def to_dict(self) -> dict[str, Any]:
        """As JSON wants it."""
        return {
            "num_files": self.num_files,
            "num_functions": self.num_functions,
            "was_tried": self.was_tried,
            "findings": [finding.to_dict() for finding in self.findings],
        }


def lint_source(path: Path) -> LintReport:
    """The rules that read source, over a folder or a file; nothing of it runs.

    Raises: UserError for a file that is not Python.
    """
    modules = read_modules(path)
    return _sorted(LintReport(_read(modules), len(modules), len(scoring_functions(modules))))


def lint_environment(path: Path, env: Any, reports: Sequence[RewardReport], *, timeout_s: float = 10.0) -> LintReport:
    """All rules: over the source, and by trying. `reports` are those of the reward tests of `env` and its members."""
    from mettle.quality.rewards.reward_test import members_of

    modules = read_modules(path)
    report = LintReport(_read(modules), len(modules), len(scoring_functions(modules)))
    for member, tested in zip(members_of(env), reports, strict=True):
        probe = Probe(modules, member, tested)
        report.findings += probe_rewards(probe, timeout_s=timeout_s)
        report.findings += data_rules(probe)
        report.was_tried = report.was_tried or bool(tested.tried)
    return _sorted(report)


def source_of(entry: EnvironmentEntry) -> Path:
    """Where the source of an environment is: its folder, or its installed module."""
    if entry.folder is not None:
        return entry.folder
    spec = importlib.util.find_spec(entry.module)
    assert spec is not None, "an installed environment has been imported"
    assert spec.origin is not None, "a module with load_environment is a file"
    origin = Path(spec.origin)
    return origin.parent if origin.name == "__init__.py" else origin


def _read(modules: Sequence[Module]) -> list[LintFinding]:
    found: list[LintFinding] = []
    for function in scoring_functions(list(modules)):
        if function.role != "tool":
            found += matching_rules(function)
        found += execution_rules(function)
        found += conduct_rules(function)
    for module in modules:
        found += module_rules(module)
    return found


def _sorted(report: LintReport) -> LintReport:
    unique = {(f.rule.id, f.file, f.line): f for f in reversed(report.findings)}
    report.findings = sorted(unique.values(), key=lambda f: (f.rule.severity, f.file, f.line, f.rule.id))
    return report
