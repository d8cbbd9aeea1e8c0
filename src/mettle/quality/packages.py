"""Is the package of an environment one that others can install, understand and trust?

Parts: `package_checks` (manifest, README), `run_package_tests`. Invariant: the package's tests run in a process of
their own, within a time limit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import mettle
from mettle.envs.packages.registry import SHIPPED, EnvironmentEntry
from mettle.extras import CHECKOUT
from mettle.quality.checks import Check, check

FIELDS = ("name", "version", "description", "readme", "requires-python", "keywords")
MIN_README_WORDS = 30
RUNS = re.compile(r"\b(mettle eval run|mettle env|vf-eval|prime eval|load_environment\()")


def package_checks(entry: EnvironmentEntry, reward_names: list[str], arguments: list[str]) -> list[Check]:
    """The manifest and the README of an environment that lies in a folder."""
    if entry.folder is None:
        what = "it is installed, and its folder is not here"
        return [Check("metadata", "skip", what), Check("readme", "skip", what)]
    return [_metadata(entry), _readme(entry.folder, reward_names, arguments)]


def run_package_tests(folder: Path | None, timeout_s: float) -> Check:
    """The package's own tests, run by pytest."""
    if folder is None or (CHECKOUT is None and folder.parent == SHIPPED):
        return Check("tests", "skip", "it is installed, and its tests are not here")
    files = [*folder.glob("tests/**/test_*.py"), *folder.glob("test_*.py")]
    if not files:
        return Check("tests", "fail", "there are none", "test that gold scores and nonsense does not: tests/test_*.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, files)]
    own = str(Path(mettle.__file__).resolve().parents[1])
    places = [own, str(folder), os.environ.get("PYTHONPATH", "")]
    folders = [str(folder.parent), os.environ.get("METTLE_ENVIRONMENTS", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "METTLE_ENVIRONMENTS": os.pathsep.join(filter(None, folders)),
    }
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Check("tests", "fail", f"no end within {timeout_s:g} s", "make them quick, or give --test-timeout")
    if "No module named pytest" in done.stderr:
        return Check("tests", "warn", "not run: pytest is not installed here", "pip install pytest")
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    said = lines[-1].strip("= ") if lines else (done.stderr.splitlines() or ["nothing was said"])[-1]
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "")
    detail = re.sub(r" in [\d.]+s.*", "", said) if done.returncode == 0 else failed or said
    return check("tests", done.returncode == 0, detail[:200], f"run them: pytest {folder / 'tests'}")


def _metadata(entry: EnvironmentEntry) -> Check:
    assert entry.folder is not None, "asked only of a folder"
    document = tomllib.loads((entry.folder / "pyproject.toml").read_text(encoding="utf-8"))
    project: dict[str, Any] = document.get("project") or {}
    missing = [name for name in FIELDS if not project.get(name) and name not in (project.get("dynamic") or [])]
    needs = [str(each) for each in project.get("dependencies") or []]
    if not any(re.match(r"(mettle|verifiers)\b", each) for each in needs):
        missing.append("a dependency on mettle or verifiers")
    if "build-system" not in document:
        missing.append("[build-system]")
    readme = project.get("readme")
    if isinstance(readme, str) and not (entry.folder / readme).is_file():
        missing.append(f"the file {readme}")
    detail = f"{entry.name} {entry.version}" if not missing else f"missing: {', '.join(missing)}"
    return check("metadata", not missing, detail, "complete pyproject.toml", otherwise="warn")


def _readme(folder: Path, reward_names: list[str], arguments: list[str]) -> Check:
    path = next((each for each in (folder / "README.md", folder / "README") if each.is_file()), None)
    fix = "say what is asked, each reward and metric, each argument, and how to run it"
    if path is None:
        return Check("readme", "fail", "there is none", fix)
    text = path.read_text(encoding="utf-8", errors="replace")
    missing = [f"reward {name}" for name in reward_names if not _names(text, name)]
    missing += [f"argument {name}" for name in arguments if not _names(text, name)]
    if not RUNS.search(text):
        missing.append("how to run it")
    num_words = len(text.split())
    if num_words < MIN_README_WORDS:
        missing.append(f"more than {num_words} words")
    detail = f"{num_words} words" if not missing else f"it does not say: {', '.join(missing)}"
    return check("readme", not missing, detail, fix, otherwise="warn")


def _names(text: str, name: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])", text) is not None
