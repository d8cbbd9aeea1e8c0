"""What differs between two sources: files that came, went or changed, and the lines of those that changed.

Parts: `difference_of`, `SourceDifference`, `FileChange`, `Hunk`, `changed_lines`. Invariants: what archives and files
may cost is bounded, whatever they hold: bytes that are unpacked, bytes that are compared by line, steps of the
comparison, lines that are shown. What goes beyond a bound is named with its sizes and not compared by
line; nothing is left out without a word.

Lines are compared by the greedy algorithm for shortest edits (Myers 1986, "An O(ND) Difference Algorithm and Its
Variations"), which ends after `MAX_EDITS`: beyond them all lines between the common beginning and end were replaced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from mettle.hub.registry.archives import unpacked_members
from mettle.wording import printable

MAX_SOURCE_BYTES: Final = 64 << 20
MAX_FILE_BYTES: Final = 256 << 10
MAX_TEXT_BYTES: Final = 4 << 20
MAX_EDITS: Final = 600
MAX_STEPS: Final = 1_500_000
MAX_LINES: Final = 3000
MAX_LINE_CHARS: Final = 400
MAX_FILES: Final = 1000
CONTEXT: Final = 3

Kind = Literal["added", "removed", "changed"]
Edit = Literal[" ", "+", "-"]


class ShownLine(NamedTuple):
    """A line; its numbers count from 1, None on the side where it is not."""

    edit: Edit
    before: int | None
    after: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines that changed, with `CONTEXT` around them."""

    head: str
    lines: list[ShownLine]


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file. `note` says why its lines are not shown, or not all."""

    path: str
    kind: Kind
    before_bytes: int | None
    after_bytes: int | None
    num_added: int
    num_removed: int
    note: str
    hunks: list[Hunk]


@dataclass(frozen=True, slots=True)
class SourceDifference:
    """All files that differ, by path. `num_hidden` more are not listed."""

    files: list[FileChange]
    num_same: int
    num_hidden: int

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


class _File(NamedTuple):
    sha256: str
    num_bytes: int
    data: bytes | None


@lru_cache(maxsize=16)
def difference_of(before: Path, after: Path) -> SourceDifference:
    """From one source archive to another; both are immutable, so that it is worked out once.

    Raises: UserError for an archive that cannot be read or unpacks to more than `MAX_SOURCE_BYTES`.
    """
    old, new = _files(before), _files(after)
    paths = sorted(path for path in {*old, *new} if _sha(old, path) != _sha(new, path))
    room = _Room(MAX_STEPS, MAX_LINES)
    files = [_change(path, old.get(path), new.get(path), room) for path in paths[:MAX_FILES]]
    return SourceDifference(files, len({*old, *new}) - len(paths), len(paths) - len(files))


@dataclass(slots=True)
class _Room:
    """What is left of the bounds that all files share."""

    steps: int
    lines: int


def _sha(files: dict[str, _File], path: str) -> str:
    return files[path].sha256 if path in files else ""


def _files(archive: Path) -> dict[str, _File]:
    """The files of an archive; contents only of those that are short enough, as long as there is room for them."""
    found: dict[str, _File] = {}
    room = MAX_TEXT_BYTES
    for path, file in unpacked_members(archive, MAX_SOURCE_BYTES):
        if file is None:
            continue
        digest, kept, num_bytes = hashlib.sha256(), b"", 0
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            num_bytes += len(chunk)
            kept += chunk[: MAX_FILE_BYTES + 1 - len(kept)]
        is_kept = num_bytes <= min(MAX_FILE_BYTES, room)
        room -= num_bytes if is_kept else 0
        found[path] = _File(digest.hexdigest(), num_bytes, kept if is_kept else None)
    return found


def _change(path: str, old: _File | None, new: _File | None, room: _Room) -> FileChange:
    kind: Kind = "added" if old is None else "removed" if new is None else "changed"
    sizes = (old.num_bytes if old else None, new.num_bytes if new else None)
    note, hunks, num_added, num_removed = "", list[Hunk](), 0, 0
    sides = [side.data for side in (old, new) if side is not None]
    if any(data is not None and _lines(data) is None for data in sides):
        note = "binary"
    elif any(data is None for data in sides):
        note = "too large to show its lines"
    elif room.steps <= 0:
        note = "not compared by line: there were too many changes before it"
    else:
        before, after = ((_lines(side.data or b"") or []) if side else [] for side in (old, new))
        room.steps -= len(before) + len(after)
        edits = list(changed_lines(before, after, room))
        num_added, num_removed = (sum(line.edit == edit for line in edits) for edit in ("+", "-"))
        hunks, note = _hunks(edits, room)
    return FileChange(printable(path), kind, *sizes, num_added, num_removed, note, hunks)


def _lines(data: bytes) -> list[str] | None:
    """The lines with their ends, None for what is no text."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if "\0" in text:
        return None
    lines = [line + "\n" for line in text.split("\n")]
    lines[-1] = lines[-1].removesuffix("\n")
    return lines if lines[-1] else lines[:-1]


def changed_lines(before: Sequence[str], after: Sequence[str], room: _Room) -> Iterator[ShownLine]:
    """All lines of both, those that are in one alone marked. `room.steps` becomes less by what it took."""
    start = 0
    while start < min(len(before), len(after)) and before[start] == after[start]:
        start += 1
    end = 0
    while end < min(len(before), len(after)) - start and before[-1 - end] == after[-1 - end]:
        end += 1
    yield from (ShownLine(" ", i + 1, i + 1, before[i]) for i in range(start))
    yield from _edits(before, after, start, len(before) - end, len(after) - end, room)
    for i in range(end, 0, -1):
        yield ShownLine(" ", len(before) - i + 1, len(after) - i + 1, before[-i])


def _edits(
    before: Sequence[str], after: Sequence[str], start: int, old_end: int, new_end: int, room: _Room
) -> Iterator[ShownLine]:
    """The lines between the common beginning and end."""
    numbers: dict[str, int] = {}
    a = [numbers.setdefault(line, len(numbers)) for line in before[start:old_end]]
    b = [numbers.setdefault(line, len(numbers)) for line in after[start:new_end]]
    same = _common(a, b, room)
    x = y = 0
    for old, new in [*same, (len(a), len(b))]:
        yield from (ShownLine("-", start + i + 1, None, before[start + i]) for i in range(x, old))
        yield from (ShownLine("+", None, start + j + 1, after[start + j]) for j in range(y, new))
        if old < len(a):
            yield ShownLine(" ", start + old + 1, start + new + 1, before[start + old])
        x, y = old + 1, new + 1


def _common(a: Sequence[int], b: Sequence[int], room: _Room) -> list[tuple[int, int]]:
    """Places of a longest common subsequence in both; none where it would take too many edits or steps."""
    furthest = {1: 0}
    trails: list[dict[int, int]] = []
    for num_edits in range(min(len(a) + len(b), MAX_EDITS) + 1):
        trails.append(dict(furthest))
        room.steps -= num_edits + 1
        for k in range(-num_edits, num_edits + 1, 2):
            is_down = k == -num_edits or (k != num_edits and furthest.get(k - 1, -1) < furthest.get(k + 1, -1))
            x = furthest[k + 1] if is_down else furthest[k - 1] + 1
            y = x - k
            while x < len(a) and y < len(b) and a[x] == b[y]:
                x, y = x + 1, y + 1
                room.steps -= 1
            furthest[k] = x
            if x >= len(a) and y >= len(b):
                return _walked_back(trails, len(a), len(b))
        if room.steps <= 0:
            break
    return []


def _walked_back(trails: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    same = []
    for num_edits in range(len(trails) - 1, -1, -1):
        furthest, k = trails[num_edits], x - y
        is_down = k == -num_edits or (k != num_edits and furthest.get(k - 1, -1) < furthest.get(k + 1, -1))
        before = k + 1 if is_down else k - 1
        old_x = furthest[before] if num_edits else 0
        old_y = old_x - before if num_edits else 0
        while x > old_x and y > old_y:
            x, y = x - 1, y - 1
            same.append((x, y))
        x, y = old_x, old_y
    return same[::-1]


def _hunks(edits: Sequence[ShownLine], room: _Room) -> tuple[list[Hunk], str]:
    """(the changed lines with some around them, a word where the rest is not shown)."""
    changed = [i for i, line in enumerate(edits) if line.edit != " "]
    spans: list[list[int]] = []
    for place in changed:
        low, high = max(0, place - CONTEXT), min(len(edits), place + CONTEXT + 1)
        if spans and low <= spans[-1][1]:
            spans[-1][1] = high
        else:
            spans.append([low, high])
    hunks = []
    for low, high in spans:
        lines = [line._replace(text=_shown(line.text)) for line in edits[low : min(high, low + room.lines)]]
        room.lines -= len(lines)
        if lines:
            hunks.append(Hunk(_head(edits[low:high]), lines))
        if low + len(lines) < high or room.lines <= 0:
            is_rest = low + len(lines) < high or [low, high] != spans[-1]
            return hunks, "the rest of it is not shown" if is_rest else ""
    return hunks, ""


def _shown(text: str) -> str:
    """A line as it can be shown: what would not be seen is escaped."""
    line = printable(text.removesuffix("\n"))
    cut = line if len(line) <= MAX_LINE_CHARS else f"{line[:MAX_LINE_CHARS]} [{len(line) - MAX_LINE_CHARS} more]"
    return cut if text.endswith("\n") else f"{cut} [no newline at the end]"


def _head(lines: Sequence[ShownLine]) -> str:
    """Where a hunk stands, as unified differences say it."""
    old = [line.before for line in lines if line.before is not None]
    new = [line.after for line in lines if line.after is not None]
    return f"@@ -{old[0] if old else 0},{len(old)} +{new[0] if new else 0},{len(new)} @@"
