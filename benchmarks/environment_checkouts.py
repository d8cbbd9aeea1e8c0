"""Which environments of public repositories load and run: their checkouts in, a page of the documentation out.

`--checkouts DIR` holds one folder a repository, as `git clone` or an unpacked wheel leaves it; a folder `owner__name`
is shown as `owner/name`. Every package in it that has a `load_environment` is tried as it stands, as
`real_environments.py` does it: in a process of its own, without network, with stood-in datasets and a scripted model.
With `--page FILE` the outcome is written there; environments of repositories that are not in DIR keep the lines that
the page has. The number that matters: how many run of those whose packages, data and keys were there.

Run: `python benchmarks/environment_checkouts.py --checkouts DIR [--page docs/reference/public-environments.md]`
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from real_environments import try_in_process

SKIPPED = frozenset({".git", ".venv", "node_modules", "tests", "test", "docs", "build", "dist"})
LOADER = re.compile(r"^\s*(?:async\s+)?def load_environment\b|^from \S+ import .*\bload_environment\b", re.MULTILINE)
NOT_DECIDED = ("third party", "network")
"""Causes that say nothing of Mettle: a package, data or a key is missing here."""
BEGIN, END = "<!-- tried: begin -->", "<!-- tried: end -->"
ROW = re.compile(r"^\| (?P<repository>\S+) \| `(?P<name>[^`]+)` \|.*\|$", re.MULTILINE)


class Found(NamedTuple):
    """One environment of a checkout: the folder to put on the path, and the module in it."""

    repository: str
    folder: Path
    module: str


def find(checkouts: Path) -> Iterator[Found]:
    """Every environment of every checkout, nothing of it imported."""
    for checkout in sorted(path for path in checkouts.iterdir() if path.is_dir()):
        for file in sorted(checkout.rglob("*.py")):
            if SKIPPED & set(file.relative_to(checkout).parts):
                continue
            top = _top_of_package(file, checkout)
            entry = top / "__init__.py" if top.is_dir() else top
            if file == entry and LOADER.search(file.read_text(encoding="utf-8", errors="replace")):
                yield Found(checkout.name.replace("__", "/", 1), top.parent, top.stem)


def _top_of_package(file: Path, checkout: Path) -> Path:
    """The module, or the outermost package that it is in."""
    top = file.parent if file.name == "__init__.py" else file
    while top.parent != checkout and (top.parent / "__init__.py").exists():
        top = top.parent
    return top


def attempt(found: Found, library: str) -> dict[str, Any]:
    """Load and run one, from a copy that has its module at the top."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / found.module
        shutil.copytree(found.folder, copy, ignore=shutil.ignore_patterns(".git", ".venv", "node_modules", "outputs"))
        return try_in_process(copy, library)


def rows(results: dict[Found, dict[str, Any]]) -> dict[tuple[str, str], str]:
    """A line of the table for each environment."""
    return {
        (found.repository, found.module): (
            f"| {found.repository} | `{found.module}` | {_yes(result['ok'] or result['stage'] == 'run')} "
            f"| {_yes(result['ok'])} | {_why(result)} |"
        )
        for found, result in results.items()
    }


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _why(result: dict[str, Any]) -> str:
    if result["ok"]:
        return "a reward raised" if result.get("silent") else ""
    said = re.sub(r"(/[\w.-]+){2,}/", "", str(result["error"])).replace("|", "/").replace("\n", " ")
    return f"{result['cause']}: {said[:160]}"


def write_page(page: Path, fresh: dict[tuple[str, str], str]) -> None:
    """Put the lines into the page, between its marks; lines of repositories that were not tried stay."""
    text = page.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    old, tail = rest.split(END)
    tried = {repository for repository, _ in fresh}
    kept = {
        (row["repository"], row["name"]): row[0] for row in ROW.finditer(old) if row["repository"] not in tried
    }  # fmt: skip
    lines = [line for _, line in sorted({**kept, **fresh}.items())]
    table = "\n".join(["| repository | environment | loads | runs | why not |", "|---|---|---|---|---|", *lines])
    page.write_text(f"{head}{BEGIN}\n{_counted(lines)}\n\n{table}\n{END}{tail}", encoding="utf-8")


def _counted(lines: list[str]) -> str:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    undecided = sum(row[4].startswith(NOT_DECIDED) for row in cells)
    repositories = len({row[0] for row in cells})
    return (
        f"{len(cells)} environments of {repositories} repositories and packages were tried; {undecided} could not be "
        f"decided here, for want of a package, data or a key. Of the other {len(cells) - undecided}, "
        f"{sum(row[2] == 'yes' for row in cells if not row[4].startswith(NOT_DECIDED))} load and "
        f"{sum(row[3] == 'yes' for row in cells)} run."
    )


def main() -> None:
    """Try every environment of the checkouts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkouts", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--library", choices=("mettle", "verifiers"), default="mettle")
    options = parser.parse_args()
    results = {found: attempt(found, options.library) for found in find(options.checkouts)}
    ran = sum(result["ok"] for result in results.values())
    print(f"{len(results)} tried, {ran} ran", dict(Counter(r["cause"] for r in results.values() if not r["ok"])))
    if options.page:
        write_page(options.page, rows(results))


if __name__ == "__main__":
    main()
