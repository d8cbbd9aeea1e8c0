"""Which languages a host has, and which versions of them: asked of the programs themselves, in a cell."""

from __future__ import annotations

import platform
from typing import Final

from mettle.sandbox.config import LanguageSpec, SandboxConfig
from mettle.sandbox.judge.builds import CellSource
from mettle.sandbox.judge.cells import CellLost
from mettle.sandbox.judge.orders import version_order
from mettle.sandbox.judge.reports import judge_end
from mettle.sandbox.judge.verdicts import Verdict
from mettle.sandbox.languages import LanguageReport
from mettle.sandbox.toolchains import why_missing

_MAX_VERSION: Final = 100


async def report_language(cells: CellSource, config: SandboxConfig, spec: LanguageSpec) -> LanguageReport:
    """One language: what its version command prints first in a cell, or why it cannot be judged here."""
    missing = why_missing(spec)
    if missing:
        return LanguageReport(spec.name, spec.aliases, False, missing=missing)
    if spec.is_warm:
        return LanguageReport(spec.name, spec.aliases, True, platform.python_version())
    if not spec.version:
        return LanguageReport(spec.name, spec.aliases, True, "unknown: it names no version command")
    limits, order = version_order(config, spec)
    try:
        async with cells.slot(), cells.cell(limits) as cell:
            cell.load_files([])
            report = await cell.run(0, order, is_last=True)
    except CellLost as error:
        return LanguageReport(
            spec.name, spec.aliases, False, missing=f"its version command took its cell down: {error}"
        )
    ending = judge_end(order, report, spec)
    if ending.verdict is not Verdict.PASSED:
        missing = f"{' '.join(spec.version)} fails in the sandbox: {ending.detail}"
        return LanguageReport(spec.name, spec.aliases, False, missing=missing)
    lines = (report.stdout.strip() or report.stderr.strip()).decode(errors="replace").splitlines() or [""]
    return LanguageReport(spec.name, spec.aliases, True, lines[0][:_MAX_VERSION])
