"""A cell in a container that one solution has to itself: the container is the jail, and this process its harness.

It is `zygote/cell.py` without the namespaces, with the container's own directories. The code runs as the same user: it
can end this process, which costs it its verdict, and cannot read or trace it. What is expected is never in here.
Invariant: when a test has left anything where another could find it, the cell says that it is worn and ends, and the
owner goes on in another container.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from mettle.sandbox.zygote import cell, frames, jail, kernel
from mettle.sandbox.zygote.meter import open_meter
from mettle.sandbox.zygote.program import ProgramDirectory
from mettle.sandbox.zygote.settings import Settings

PROGRAMS: Final = "/program"
_WORK: Final = "/work"
_PRIVATE: Final = (_WORK, "/tmp", "/dev/shm")

State = tuple[tuple[str, int, int], ...]


class ContainerCell(cell.CellProcess):
    """The loop of a cell whose tests share the container's directories, and find them as they were at the start."""

    def __init__(self, channel: socket.socket, settings: Settings, files: ProgramDirectory | None) -> None:
        super().__init__(channel, settings, None, files, open_meter(may_use_event=settings.may_use_event, entrances=()))
        self._scratch = _WORK
        self._at_start = _state_of(_PRIVATE)
        self._program_state: State = ()

    def renew_scratch(self) -> None:
        """Nothing is renewed here: a cell whose directories were touched ends."""
        if self._files is not None:
            self._program_state = _state_of([self._files.path])

    def remove_scratch(self) -> None:
        """The container takes everything along."""

    def is_worn(self) -> bool:
        """Whether a test has made, changed or removed a file."""
        if self._files is not None and _state_of([self._files.path]) != self._program_state:
            return True
        return _state_of(_PRIVATE) != self._at_start

    def _load(self, order: frames.Order) -> None:
        super()._load(order)
        self.renew_scratch()


def live(channel: socket.socket, settings: Settings, *, has_files: bool) -> NoReturn:
    """The cell's whole life, in a process that process 1 has forked for it."""
    try:
        _live(jail.keep_only(channel)[0], settings, has_files=has_files)
    except ConnectionError:
        pass  # the owner hung up
    except BaseException as error:
        print(f"a cell ends: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        jail.kill_descendants()
        os._exit(0)


def _live(channel: socket.socket, settings: Settings, *, has_files: bool) -> None:
    try:
        kernel.die_with_parent()
        kernel.adopt_orphans()
        os.chdir(_WORK)
        for name in settings.preload:
            importlib.import_module(name)
        jail.limit(file_bytes=settings.max_file_bytes, open_files=settings.max_open_files)
        files = ProgramDirectory.make_open(f"{PROGRAMS}/{os.getpid()}") if has_files else None
        made = ContainerCell(channel, settings, files)
        made.prepare_child()
    except (OSError, ImportError) as error:
        channel.sendall(frames.encode({"failed": str(error)}))
        return
    channel.sendall(frames.encode({"ready": True, "proc": True}))
    made.serve()


def _state_of(directories: Sequence[str]) -> State:
    """What changes when anything in these is made, removed or changed; of each entry, the inode's own time tells."""
    found = []
    for directory in directories:
        for path in (directory, *(f"{directory}/{name}" for name in sorted(_names(directory)))):
            try:
                seen = os.lstat(path)
            except OSError:
                continue
            found.append((path, seen.st_ino, seen.st_ctime_ns))
    return tuple(found)


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
