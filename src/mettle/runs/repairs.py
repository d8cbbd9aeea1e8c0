"""Putting right what the preflight found, where a program may: and proof that it is right now.

Parts: `Repair` (what it would do), `REPAIRS` (by the name of the check), `Attempt`, `repair`. Folders, stale files and
a `.gitignore` are put right at once; what fetches packages is run when the person says yes; what needs root or the
shell is only ever shown. Invariant: "fixed" is said when the same check, run again, finds nothing wrong, and at no
other time.
"""

from __future__ import annotations

import importlib.metadata
import shlex
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mettle.extras import CHECKOUT, missing_requirements
from mettle.runs import leftovers
from mettle.runs.preflight import CHECKS, Finding, run_check, state_folder

Status = Literal["fixed", "better", "not fixed", "needs yes", "by hand"]

PIP_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Repair:
    """What would be done: `apply` does it and raises when it cannot. `needs_yes` is set for what fetches packages."""

    what: str
    apply: Callable[[], None]
    needs_yes: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """How one repair ended, and what its check found afterwards."""

    name: str
    status: Status
    what: str
    detail: str
    after: Finding


def repair(finding: Finding, *, is_yes: bool) -> Attempt | None:
    """Put right what `finding` is about and run its check again; None where nothing is wrong."""
    if finding.level == "ok":
        return None
    make = REPAIRS.get(finding.name)
    planned = make() if make is not None else None
    if planned is None:
        return Attempt(finding.name, "by hand", "", finding.advice, finding)
    if planned.needs_yes and not is_yes:
        return Attempt(finding.name, "needs yes", planned.what, "`mettle doctor --fix --yes` runs it", finding)
    try:
        planned.apply()
    except (OSError, subprocess.SubprocessError) as error:
        return Attempt(finding.name, "not fixed", planned.what, _reason(error), run_check(finding.name, finding))
    after = run_check(finding.name, finding)
    if after.level == "ok":
        return Attempt(finding.name, "fixed", planned.what, after.detail, after)
    better = finding.level == "fail" and after.level == "warn"
    return Attempt(finding.name, "better" if better else "not fixed", planned.what, after.detail, after)


def _install() -> Repair | None:
    try:
        missing = missing_requirements()
    except importlib.metadata.PackageNotFoundError:
        return _pip(["-e", str(CHECKOUT)]) if CHECKOUT is not None else None
    wanted = dict.fromkeys(requirement for requirements in missing.values() for requirement in requirements)
    return _pip(list(wanted)) if wanted else None


def _install_environments() -> Repair | None:
    folders = leftovers.environments_with_missing_packages()
    return _pip([word for folder in folders for word in ("-e", str(folder))]) if folders else None


def _pip(arguments: list[str]) -> Repair:
    command = [sys.executable, "-m", "pip", "install", *arguments]

    def apply() -> None:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=PIP_TIMEOUT_S)

    return Repair(shlex.join(command), apply, needs_yes=True)


def _make_state_folder() -> Repair | None:
    folder = state_folder()

    def apply() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(folder.stat().st_mode | stat.S_IRWXU)

    return Repair(f"make {folder} a folder that you may write to", apply)


def _clear_leftovers() -> Repair | None:
    found = leftovers.dead_runs()
    if not found:
        return None

    def apply() -> None:
        for left in found:
            left.clear()

    return Repair(f"clear what {', '.join(left.run.name for left in found)} left behind", apply)


def _ignore_outputs() -> Repair | None:
    lacking = leftovers.paths_not_ignored()
    if not lacking:
        return None

    def apply() -> None:
        path = Path(".gitignore")
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        gap = "" if not before or before.endswith("\n") else "\n"
        with path.open("a", encoding="utf-8") as file:
            file.write(gap + "".join(f"{name}\n" for name in lacking))

    return Repair(f"add {', '.join(lacking)} to .gitignore", apply)


REPAIRS: Mapping[str, Callable[[], Repair | None]] = {
    "packages": _install,
    "environment packages": _install_environments,
    "state folder": _make_state_folder,
    "dead runs": _clear_leftovers,
    "git": _ignore_outputs,
}
"""Repairs by the name of their check. What is not here is the person's to do; the finding's advice says how."""

assert set(REPAIRS) <= set(CHECKS), "a repair is of a check that there is"


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stderr or error.stdout or "").strip().splitlines()
        return f"exit {error.returncode}: {lines[-1] if lines else 'it said nothing'}"
    return f"{type(error).__name__}: {error}"
