"""Files on their way into a machine and out of it.

Parts: `file_pieces`, the bytes that a worker's `put` understands; `Entry`; `Snapshot`. Invariant: a file of the host is
read piece by piece, and exactly as long as was announced.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

from mettle.errors import UserError

_LENGTH: Final = struct.Struct(">I")
_PIECE_BYTES: Final = 1 << 20
_DEFAULT_MODE: Final = 0o644
Content = bytes | str | Path


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing in a machine's directory."""

    name: str
    kind: Literal["file", "directory", "link", "other"]
    num_bytes: int
    mode: int
    modified: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Directories of a machine at one moment, as a tar archive."""

    data: bytes
    paths: tuple[str, ...]


class Fillable(Protocol):
    """What is needed of a machine to give it its first contents."""

    async def upload_files(self, files: Mapping[str, Content]) -> None: ...

    async def restore(self, snapshot: Snapshot) -> None: ...

    async def delete(self) -> None: ...


@contextlib.asynccontextmanager
async def deleted_on_failure(machine: Fillable) -> AsyncIterator[None]:
    """A machine that does not become what was asked for does not stay."""
    try:
        yield
    except BaseException:
        await machine.delete()
        raise


async def fill(machine: Fillable, files: Mapping[str, Content], snapshot: Snapshot | None = None) -> None:
    """Put its first contents into a machine that nobody else has yet; one that cannot be filled is deleted."""
    async with deleted_on_failure(machine):
        if snapshot is not None:
            await machine.restore(snapshot)
        if files:
            await machine.upload_files(files)


def file_pieces(files: Mapping[str, Content]) -> Iterator[bytes]:
    """The files as a stream: for each its header, then its bytes. A directory of the host stands for all in it."""
    for path, content in files.items():
        if isinstance(content, Path):
            yield from _host_pieces(path, content)
        else:
            data = content.encode() if isinstance(content, str) else bytes(content)
            yield _header(path, len(data), _DEFAULT_MODE) + data


def _host_pieces(path: str, source: Path) -> Iterator[bytes]:
    if source.is_dir():
        for inner in sorted(source.rglob("*")):
            if inner.is_file():
                yield from _host_pieces(f"{path}/{inner.relative_to(source).as_posix()}", inner)
        return
    try:
        file = source.open("rb")
    except OSError as error:
        raise UserError(f"{source} cannot be read for upload: {error.strerror}") from error
    with file:
        found = os.fstat(file.fileno())
        yield _header(path, found.st_size, stat.S_IMODE(found.st_mode) | 0o600)
        left = found.st_size
        while left > 0 and (data := file.read(min(_PIECE_BYTES, left))):
            left -= len(data)
            yield data
        if left:
            raise UserError(f"{source} became shorter while it was uploaded")


def _header(path: str, num_bytes: int, mode: int) -> bytes:
    text = json.dumps({"path": path, "size": num_bytes, "mode": mode}).encode()
    return _LENGTH.pack(len(text)) + text


def read_entries(lines: bytes) -> list[Entry]:
    """The listing that a worker has sent; its names are the code's, and nothing else is taken for granted."""
    entries = []
    for line in lines.splitlines():
        name, kind, num_bytes, mode, modified = json.loads(line)
        entries.append(Entry(str(name), kind, int(num_bytes), int(mode), float(modified)))
    return sorted(entries, key=lambda entry: entry.name)
