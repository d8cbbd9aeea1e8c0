"""A machine's files as a tar stream, and back. Both ends run inside a machine, as the user that the code is.

Files, directories and links travel, with modes and times; sockets, pipes and devices are left out.
Invariant: a name that is absolute or climbs is refused; a file that changes while it is read keeps the size that its
entry has promised.
`tarfile` is imported when it is needed: it brings three compressors, and what a template has loaded every fork of it
copies (`template.py` loads it with the first machine).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import tarfile


class _Exactly:
    """A file as exactly so many bytes: what has been cut off meanwhile is zeros."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, num_bytes: int = -1, /) -> bytes:
        return self._file.read(num_bytes).ljust(num_bytes, b"\0")


def pack(paths: Sequence[tuple[str, str]], stream: IO[bytes]) -> None:
    """Write everything at and below each path; the first of a pair is its name in the archive."""
    import tarfile

    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for name, path in paths:
            for inner_name, inner_path in _walk(name.strip("/"), path):
                _add(archive, inner_name, inner_path)


def _walk(name: str, path: str) -> Iterator[tuple[str, str]]:
    """Everything below a path, parents first, without recursion: the code decides how deep it goes."""
    waiting = [(name, path)]
    while waiting:
        name, path = waiting.pop()
        yield name, path
        if stat.S_ISDIR(os.lstat(path).st_mode):
            waiting += [(f"{name}/{inner}", f"{path}/{inner}") for inner in sorted(os.listdir(path), reverse=True)]


def _add(archive: tarfile.TarFile, name: str, path: str) -> None:
    entry = archive.gettarinfo(path, name)
    if entry is None or not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
        return
    if not entry.isreg():
        archive.addfile(entry)
        return
    with open(path, "rb") as file:
        archive.addfile(entry, _Exactly(file))


def unpack(stream: IO[bytes], place: Callable[[str], str]) -> None:
    """Make everything that the stream holds; `place` says where a name belongs."""
    import tarfile

    directories: list[tuple[str, tarfile.TarInfo]] = []
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for entry in archive:
            path = place(_checked(entry.name))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if entry.isdir():
                os.makedirs(path, exist_ok=True)
                directories.append((path, entry))
            else:
                _make(archive, entry, path, place)
    for path, entry in reversed(directories):  # a read-only directory is made so when it is full
        os.chmod(path, entry.mode & 0o7777)
        os.utime(path, (entry.mtime, entry.mtime))


def _checked(name: str) -> str:
    if name.startswith("/") or ".." in name.split("/"):
        raise OSError(errno.EINVAL, f"a name that leads elsewhere: {name[:100]}")
    return name


def _make(archive: tarfile.TarFile, entry: tarfile.TarInfo, path: str, place: Callable[[str], str]) -> None:
    if os.path.lexists(path):
        os.unlink(path)
    if entry.issym():
        os.symlink(entry.linkname, path)
        return
    if entry.islnk():
        os.link(place(_checked(entry.linkname)), path)
        return
    source = archive.extractfile(entry)
    if source is None:
        return
    with open(path, "xb") as file:
        while data := source.read(1 << 16):
            file.write(data)
    os.chmod(path, entry.mode & 0o7777)
    os.utime(path, (entry.mtime, entry.mtime))
