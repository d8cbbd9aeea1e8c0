"""Runs a program of the tests as an ordinary user, where the tests themselves are run by root."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

UID = 64_114  # neither the pool's own ordinary user nor, probably, anybody's
_COVERED = """
for pair in "$@"; do
  shift
  [ "$pair" = -- ] && break
  mount --bind "${pair#*=}" "${pair%%=*}" || exit 9
done
exec setpriv "$@"
"""
ROOT = Path(__file__).resolve().parents[2]


def _environment() -> dict[str, str]:
    paths = [ROOT / "src", Path(__file__).parent, Path(sysconfig.get_path("purelib"))]
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HOME": "/tmp",
        "LOGNAME": f"mettle-{UID}",  # by which pytest names its directory
    }


def interpreter() -> str | None:
    """One of this version that such a user can run, and that finds Mettle; None if there is none."""
    if os.geteuid() != 0:
        return None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (os.path.realpath(sys.executable), f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"):
        try:
            tried = run(candidate, ["-c", "import mettle.sandbox, attacks"], timeout_s=30)
        except OSError:
            continue
        if tried.returncode == 0:
            return candidate
    return None


def run(executable: str, arguments: Sequence[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run it and wait."""
    return subprocess.run(
        [executable, *arguments],
        user=UID,
        group=UID,
        extra_groups=[],
        env=_environment(),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run_beside(
    covered: Mapping[str, Path], executable: str, arguments: Sequence[str], *, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """The same where these files of the host's are others, for this program alone."""
    pairs = [f"{place}={path}" for place, path in covered.items()]
    user = [f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--", executable, *arguments]
    return subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", _COVERED, "sh", *pairs, "--", *user],
        env=_environment(),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
