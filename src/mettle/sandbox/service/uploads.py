"""Uploads: what has come of them is in files and not in memory, until it is complete.

Invariant: the files are gone when the request is over; those of a service that was killed go with the next sweep.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import struct
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from starlette.requests import Request

from mettle.errors import UserError
from mettle.sandbox.service.faults import own_disk
from mettle.sandbox.service.state import service_of
from mettle.web.bodies import body_chunks

_LENGTH: Final = struct.Struct(">I")
_MAX_HEADER: Final = 1 << 16
_MAX_FILES: Final = 100_000
_SPOOL: Final = "mettle-upload-"


def upload_chunks(request: Request) -> AsyncIterator[bytes]:
    """The body of an upload, within the service's limits."""
    config = service_of(request).config
    return body_chunks(request, max_bytes=config.max_body_mb << 20, stall_s=config.stall_s)


@dataclass
class Spool:
    """A directory for one request's uploads, locked while it is in use. Use as `with Spool(parent) as spool`."""

    parent: Path
    _directory: tempfile.TemporaryDirectory[str] | None = None
    _lock: int = -1
    files: dict[str, bytes | str | Path] = field(default_factory=dict)
    """What has come, by its path in the machine."""

    def __enter__(self) -> Spool:
        try:
            while self._lock < 0:  # a sweep that came before the lock has taken the directory away
                self._directory = tempfile.TemporaryDirectory(prefix=_SPOOL, dir=self.parent)
                self._lock = _lock_directory(Path(self._directory.name))
        except OSError as error:
            raise own_disk(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._directory is not None:
            self._directory.cleanup()
        if self._lock >= 0:
            os.close(self._lock)

    async def receive(self, path: str, mode: int, source: AsyncIterator[bytes]) -> None:
        """Take one file, for `path` in the machine."""
        assert self._directory is not None, "a spool is used in a with block"
        target = Path(self._directory.name) / str(len(self.files))
        self.files[path] = target
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                async for piece in source:
                    await asyncio.to_thread(_write_all, file.fileno(), piece)
            target.chmod((mode & 0o777) | 0o600)
        except OSError as error:
            raise own_disk(error) from error

    async def receive_many(self, source: AsyncIterator[bytes]) -> None:
        """Take files as `mettle.sandbox.machines.files.file_pieces` lines them up: header, bytes, header, bytes."""
        reader = _Reader(source)
        while (prefix := await reader.exactly(_LENGTH.size, may_end=True)) is not None:
            [length] = _LENGTH.unpack(prefix)
            if length > _MAX_HEADER or len(self.files) >= _MAX_FILES:
                raise UserError(f"an upload has at most {_MAX_FILES:,} files, with names of {_MAX_HEADER} bytes")
            header = await reader.exactly(length)
            assert header is not None, "only the first read may end"
            try:
                about = json.loads(header)
                path, size, mode = str(about["path"]), int(about["size"]), int(about["mode"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"the header of file {len(self.files)} of the upload cannot be read") from error
            if path in self.files or size < 0:
                raise UserError(f"the upload names {path!r} twice, or with a size below 0")
            await self.receive(path, mode, reader.upto(size))


def sweep_spools(parent: Path) -> None:
    """Delete the uploads of services that were killed: those that nobody holds the lock of."""
    for path in parent.glob(f"{_SPOOL}*"):
        with contextlib.suppress(OSError):
            if (lock := _lock_directory(path, fcntl.LOCK_NB)) >= 0:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _lock_directory(path: Path, flags: int = 0) -> int:
    """A descriptor that holds the lock of a directory; -1 when it has gone. Raises: OSError."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | flags)
    except OSError:
        os.close(lock)
        raise
    if path.exists():
        return lock
    os.close(lock)
    return -1


class _Reader:
    """Exact numbers of bytes out of pieces of any size."""

    def __init__(self, source: AsyncIterator[bytes]) -> None:
        self._source = source
        self._held = b""

    async def exactly(self, num_bytes: int, *, may_end: bool = False) -> bytes | None:
        got = b"".join([piece async for piece in self.upto(num_bytes, may_end=may_end)])
        return got if got or not num_bytes else None

    async def upto(self, num_bytes: int, *, may_end: bool = False) -> AsyncIterator[bytes]:
        """That many bytes, as they come; UserError when there are fewer."""
        left = num_bytes
        while left:
            if not self._held:
                self._held = await anext(self._source, b"")
            if not self._held:
                if may_end and left == num_bytes:
                    return
                raise UserError("the upload ends in the middle of a file")
            piece, self._held = self._held[:left], self._held[left:]
            left -= len(piece)
            yield piece


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
