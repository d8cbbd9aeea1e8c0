"""A folder of work on a joined machine, of which the Hub has a copy that follows.

What changes is handed in: logs and shards by what they have grown, other files whole, a database as a snapshot of what
is committed. The snapshot is taken first and handed in last, so that the copy at the Hub is at each moment a folder
that a process which was killed could have left: no row of its database speaks of bytes that are not there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from mettle.hub.evaluating.source import LOG
from mettle.hub.machines.work_files import MAX_PIECE_BYTES, Mode, is_work_file, snapshot

PUSH_EVERY_S: Final = 2.0
SPACING: Final = 10.0
"""A push that took t seconds is followed by none for this many times t."""


class HandIn(Protocol):
    """Send a piece of a file to the Hub; False when it does not go on where the file ends there."""

    def __call__(self, name: str, data: bytes, *, offset: int, size: int, mode: Mode) -> bool: ...


class _Stamp(NamedTuple):
    inode: int
    size: int
    changed_ns: int


class FolderMirror:
    """Follows one folder. `note_stored` says that the Hub has it as it is."""

    def __init__(self, folder: Path, hand_in: HandIn, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._hand_in, self._clock = folder, hand_in, clock
        self._known: dict[str, _Stamp] = {}
        self._stored: set[str] = set()
        self._next = float("-inf")

    def note_stored(self) -> None:
        """What is there came from the Hub. Of such a file nothing is known but that it is the same until it changes:
        who goes on with it may cut its end off first."""
        for name, path in self._files().items():
            self._known[name] = _stamp(path)
            self._stored.add(name)

    def push(self, *, is_last: bool = False) -> None:
        """Hand in what has changed, when it is time for that again. Raises: what `hand_in` raises."""
        started = self._clock()
        if started < self._next and not is_last:
            return
        try:
            self._push_all()
        finally:
            now = self._clock()
            self._next = now + max(PUSH_EVERY_S, SPACING * (now - started))

    def _push_all(self) -> None:
        files = self._files()
        with ExitStack() as open_files:
            copies: dict[str, tuple[Path, _Stamp]] = {}
            for name in [each for each in files if each.endswith(".db")]:
                stamp = _database_stamp(files.pop(name))
                if stamp != self._known.get(name):
                    copy = open_files.enter_context(tempfile.NamedTemporaryFile(prefix="mettle-mirror-"))
                    snapshot(self._folder / name, Path(copy.name))
                    copies[name] = (Path(copy.name), stamp)
            for name in self._files() if copies else files:
                if not name.endswith(".db"):
                    self._push_file(name)
            for name, (path, stamp) in copies.items():
                self._send(name, path, 0, path.stat().st_size, "whole")
                self._known[name] = stamp

    def _push_file(self, name: str) -> None:
        path = self._folder / name
        try:
            stamp, known = _stamp(path), self._known.get(name)
        except FileNotFoundError:  # it was there a moment ago
            return
        if stamp == known:
            return
        is_grown = (
            known is not None and name not in self._stored and _only_grows(name)
            and known.inode == stamp.inode and known.size < stamp.size
        )  # fmt: skip
        try:
            first = known.size if is_grown and known is not None else 0
            if not (is_grown and self._send(name, path, first, stamp.size, "append")):
                self._send(name, path, 0, stamp.size, "whole")
        except FileNotFoundError:
            return
        self._known[name] = stamp
        self._stored.discard(name)

    def _send(self, name: str, path: Path, first: int, size: int, mode: Mode) -> bool:
        with path.open("rb") as file:
            file.seek(first)
            while True:
                data = file.read(min(MAX_PIECE_BYTES, size - first))
                if not self._hand_in(name, data, offset=first, size=size, mode=mode):
                    return False
                first += len(data)
                if first >= size or not data:
                    return True

    def _files(self) -> dict[str, Path]:
        found = {path.relative_to(self._folder).as_posix(): path for path in self._folder.rglob("*")}
        return {
            name: path for name, path in sorted(found.items())
            if is_work_file(name) and path.is_file() and not path.is_symlink()
        }  # fmt: skip


def _only_grows(name: str) -> bool:
    return name == LOG or "/rollouts/" in name


def _stamp(path: Path) -> _Stamp:
    found = path.stat()
    return _Stamp(found.st_ino, found.st_size, found.st_mtime_ns)


def _database_stamp(path: Path) -> _Stamp:
    """With its write-ahead log, where what is committed lies at first."""
    own, log = _stamp(path), path.with_name(f"{path.name}-wal")
    if not log.exists():
        return own
    of_log = _stamp(log)
    return _Stamp(own.inode, own.size + (of_log.size << 20), own.changed_ns + of_log.changed_ns)
