"""What is found lying about in a workspace: of runs that died, of environments that lack packages, outside git's view.

Parts: `DeadRun`, `dead_runs`, `environments_with_missing_packages`, `paths_not_ignored`. Invariant: nothing of a run
that lives, or that may be starting, is ever counted as left behind: its supervisor holds the kernel's lock.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

from mettle.processes.child import is_alive
from mettle.runs.lock import supervisor_pid
from mettle.storage.run_dir import RunDir

GIT_TIMEOUT_S = 10.0
WORKSPACE_SIGNS = ("environments", "configs", "runs")


@dataclass(frozen=True, slots=True)
class DeadRun:
    """Files of a run whose processes are gone: a lock that names a dead supervisor, addresses where nobody answers."""

    run: RunDir
    files: tuple[Path, ...]

    def clear(self) -> None:
        """Empty the lock and remove the addresses, under the run's own lock, so that no start is disturbed."""
        path = self.run.path / "supervisor.lock"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: it has just been started.
            for file in self.files:
                if file != path:
                    file.unlink(missing_ok=True)
            os.ftruncate(handle, 0)
        finally:
            os.close(handle)


def dead_runs(folder: Path = Path("runs")) -> list[DeadRun]:
    """The runs in `folder` whose supervisor was killed and left something behind."""
    found = []
    for ledger in sorted(folder.glob("*/run.db")):
        run = RunDir(ledger.parent)
        if supervisor_pid(run) is not None:
            continue
        lock = run.path / "supervisor.lock"
        files = [lock] if lock.exists() and lock.stat().st_size else []
        files += [path for path in sorted((run.path / "endpoints").glob("*.json")) if not is_alive(_pid_in(path))]
        if files:
            found.append(DeadRun(run, tuple(files)))
    return found


def environments_with_missing_packages(folder: Path = Path("environments")) -> list[Path]:
    """Packages in `folder` whose dependencies are not all installed."""
    return [path.parent for path in sorted(folder.glob("*/pyproject.toml")) if _missing_dependencies(path)]


def paths_not_ignored() -> list[str]:
    """Outputs of this workspace that git would add; empty outside a workspace or a repository."""
    if not any(Path(sign).is_dir() for sign in WORKSPACE_SIGNS):
        return []
    probes = {"/runs/": "runs/a/run.db", "/outputs/": "outputs/evals/a/b/results.jsonl", "/data/": "data/a/train.jsonl"}
    return [name for name, path in probes.items() if _is_seen_by_git(path)]


def _is_seen_by_git(path: str) -> bool:
    try:
        done = subprocess.run(
            ["git", "check-ignore", "-q", "--no-index", path], capture_output=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 1  # 0 is ignored, 128 is no repository.


def _missing_dependencies(manifest: Path) -> list[str]:
    try:
        project = tomllib.loads(manifest.read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        return []
    missing = []
    for requirement in project.get("dependencies", []):
        name = re.match(r"[A-Za-z0-9._-]+", str(requirement))
        if name is None or name[0] in ("mettle-lab", "verifiers"):  # These are this program, installed or not.
            continue
        try:
            importlib.metadata.version(name[0])
        except importlib.metadata.PackageNotFoundError:
            missing.append(str(requirement))
    return missing


def _pid_in(path: Path) -> int | None:
    try:
        pid = json.loads(path.read_text(encoding="utf-8")).get("pid")
    except (OSError, ValueError, AttributeError):
        return None
    return pid if isinstance(pid, int) else None
