"""The steps of a release, and the lock of versions that the tests ran with.

`make lock` writes constraints.txt from the virtual environment. `make release VERSION=1.2.3` wants a clean tree, puts
the version into pyproject.toml and the date into CHANGELOG.md, runs every test, builds sdist and wheel, and tags.
Nothing is uploaded: what it ends with is a commit, a tag and two files in dist/.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNRELEASED = "## Unreleased\n"
NOT_LOCKED = re.compile(r"torch|triton|nvidia-.*|cuda-.*|pip|setuptools|wheel")
"""Builds of these differ between machines; the Makefile and pyproject.toml say which is taken."""
HEAD = "# The versions that the tests last passed with, on Python {version}. Written by `make lock`.\n"


def main(words: list[str]) -> int:
    if words == ["lock"]:
        (ROOT / "constraints.txt").write_text(locked())
        return 0
    if len(words) == 2 and words[0] == "make":
        return release(words[1])
    print("usage: release.py lock | make VERSION", file=sys.stderr)
    return 2


def locked() -> str:
    """`name==version` of all that is installed, but what is ours and what depends on the machine."""
    found = {}
    for package in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()
        is_editable = '"editable": true' in (package.read_text("direct_url.json") or "")
        if not is_editable and not NOT_LOCKED.fullmatch(name):
            found[name] = package.version
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return HEAD.format(version=version) + "".join(f"{name}=={found[name]}\n" for name in sorted(found))


def release(version: str) -> int:
    """Everything up to the tag; the first thing that is not right ends it with a line."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        print(f"{version!r} is no version like 1.2.3 or 1.2.3rc1", file=sys.stderr)
        return 2
    if run("git", "status", "--porcelain", is_read=True):
        print("there are changes that are not committed; a release is made from a clean tree", file=sys.stderr)
        return 2
    changelog = ROOT / "CHANGELOG.md"
    changelog.write_text(dated(changelog.read_text(), version, datetime.date.today()))
    project = ROOT / "pyproject.toml"
    project.write_text(re.sub(r'(?m)^version = ".*"$', f'version = "{version}"', project.read_text(), count=1))
    run("make", "test-all")
    run("make", "dist")
    run("git", "commit", "-am", f"Mettle {version}")
    run("git", "tag", "-a", f"v{version}", "-m", f"Mettle {version}")
    print(f"tagged v{version}; dist/ holds what is to be uploaded, and `git push --follow-tags` publishes the tag")
    return 0


def dated(changelog: str, version: str, day: datetime.date) -> str:
    """The changelog with what was unreleased under its version.

    Raises: SystemExit when there is nothing to release, or the version is there already.
    """
    if f"## {version} " in changelog:
        raise SystemExit(f"CHANGELOG.md has {version} already")
    head, found, rest = changelog.partition(UNRELEASED)
    if not found or not rest.lstrip().startswith("-"):
        raise SystemExit("CHANGELOG.md has nothing under 'Unreleased'")
    return f"{head}{UNRELEASED}\n## {version} ({day.isoformat()})\n{rest}"


def run(*command: str, is_read: bool = False) -> str:
    """A command in the root of the checkout; one that fails ends the release."""
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE if is_read else None, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}; nothing was tagged")
    return (done.stdout or "").strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
