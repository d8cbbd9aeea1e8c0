"""Where evaluations are looked for: the places that everybody knows, and those that somebody chose with `-o`.

Parts: `PLACES`, `find_folders`, `remember_place`, `is_collection`. A folder that was given with `-o` is written down in
`.mettle/evaluations` of the workspace, a line each. Invariants: a place that is gone is passed over; the file is only
ever added to, and a workspace in which nothing can be written is no error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mettle.evals.results import METADATA, RESULTS

LEDGER = "run.db"
PLACES = ("outputs/evals", "environments/*/outputs/evals", "runs", "what -o named")
REMEMBERED = Path(".mettle") / "evaluations"


def find_folders(root: Path) -> list[Path]:
    """Folders with evaluations: of a workspace, or under a folder that holds evaluations itself."""
    bases = {root, root / "outputs" / "evals", *root.glob("environments/*/outputs/evals"), *_remembered(root)}
    found = {file.parent for base in bases for name in (METADATA, LEDGER) for file in base.glob(f"*/*/{name}")}
    return sorted(found | {file.parent for file in root.glob(f"runs/*/{LEDGER}")})


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
