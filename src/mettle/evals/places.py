"""Where evaluations are looked for: the places that everybody knows, and those that somebody chose with `-o`.

Parts: `PLACES`, `find_folders`, `remember_place`, `is_collection`. A folder that was given with `-o` is written down in
`.mettle/evaluations` of the workspace, a line each. Invariants: a place that is gone is passed over; the file is only
ever added to, and a workspace in which nothing can be written is no error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mettle.evals.results import METADATA, RESULTS

LEDGER = "run.db"
PLACES = ("outputs/evals", "environments/*/outputs/evals", "runs", "what -o named")
REMEMBERED = Path(".mettle") / "evaluations"


def find_folders(root: Path, *, passing_over: Path | None = None) -> list[Path]:
    """Folders with evaluations: of a workspace, or under a folder that holds evaluations itself.

    What lies in `passing_over` is left out: its runs are known to the caller, who need not look at each again.
    """
    bases = {root, root / "outputs" / "evals", *root.glob("environments/*/outputs/evals"), *_remembered(root)}
    found: set[str] = set()
    for base in bases:
        for folder in _folders_in(str(base)):
            found.update(_with_files(folder, (METADATA, LEDGER), passing_over))
    found.update(_with_files(str(root / "runs"), (LEDGER,), passing_over))
    return [Path(each) for each in sorted(found, key=lambda each: each.split(os.sep))]


def _folders_in(folder: str) -> list[str]:
    """Without a `Path`: a list of evaluations asks for thousands."""
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if entry.is_dir()]
    except OSError:
        return []


def _with_files(folder: str, names: tuple[str, ...], passing_over: Path | None) -> list[str]:
    """The folders in one that have one of some files."""
    if passing_over is not None and os.path.realpath(folder) == str(passing_over):
        return []
    return [each for each in _folders_in(folder) if any(os.path.exists(f"{each}/{name}") for name in names)]


def is_collection(path: Path) -> bool:
    """True for a folder that is no evaluation itself and has some under it, as `-o` leaves it."""
    if not path.is_dir() or any((path / name).exists() for name in (METADATA, RESULTS, LEDGER)):
        return False
    return bool(find_folders(path))


def remember_place(folder: Path, root: Path = Path()) -> None:
    """Have `find_folders` of this workspace look into `folder`, too."""
    if folder.resolve() in {root.resolve(), (root / "outputs" / "evals").resolve(), *_remembered(root)}:
        return
    file = root / REMEMBERED
    with suppress(OSError):  # The evaluation is safe where it is; only the list would not name it.
        file.parent.mkdir(exist_ok=True)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(f"{folder.resolve()}\n")


def _remembered(root: Path) -> Iterator[Path]:
    with suppress(OSError, ValueError):
        for line in (root / REMEMBERED).read_text(encoding="utf-8").splitlines():
            path = Path(line)
            if line and path.is_dir():
                yield path
