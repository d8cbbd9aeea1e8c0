"""Reading requests within their limits: JSON, raw bytes, and many files in one body.

Invariant: nothing is read beyond its limit, a client that stops sending is hung up on, and what has come of an upload
is in a file and not in memory; the file is gone when the request is over.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import fcntl
import json
import os
import shutil
import struct
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from aiohttp import web

from mettle.errors import SandboxError, UserError
from mettle.sandbox.service.faults import TooLarge, own_disk

T = TypeVar("T")
_MB: Final = 1 << 20
_LENGTH: Final = struct.Struct(">I")
_MAX_HEADER: Final = 1 << 16
_MAX_FILES: Final = 100_000
_SPOOL: Final = "mettle-upload-"


async def chunks(request: web.Request, max_mb: int, stall_s: float) -> AsyncIterator[bytes]:
    """The body, piece by piece. Raises: TooLarge, SandboxError for a client that stalls or leaves."""
    if (request.content_length or 0) > max_mb * _MB:
        raise TooLarge(f"the body has {request.content_length:,} bytes; this service takes {max_mb} MB")
    num_bytes = 0
    while True:
        try:
            async with asyncio.timeout(stall_s):
                piece = await request.content.readany()
        except TimeoutError:
            raise SandboxError(f"the client sent nothing for {stall_s:g} s in the middle of a body") from None
        if not piece:
            return
        num_bytes += len(piece)
        if num_bytes > max_mb * _MB:
            raise TooLarge(f"the body has more than {max_mb} MB, which is what this service takes")
        yield piece


async def read_bytes(request: web.Request, max_mb: int, stall_s: float) -> bytes:
    """The whole body in memory."""
    received = bytearray()
    async for piece in chunks(request, max_mb, stall_s):
        received += piece
    return bytes(received)


async def read_json(request: web.Request, max_mb: int, stall_s: float) -> dict[str, Any]:
    """A JSON object. Raises: UserError for anything else."""
    data = await read_bytes(request, max_mb, stall_s)
    try:
        body = json.loads(data) if data else {}
    except (ValueError, RecursionError) as error:
        raise UserError(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise UserError(f"the body is a JSON {type(body).__name__}; it must be an object")
    return body


def take(body: Mapping[str, Any], name: str, kind: type[T] | tuple[type[T], ...], default: T) -> T:
    """One field of a body, of the right type. Raises: UserError that names it."""
    value = body.get(name)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise UserError(f"{name} is {str(value)[:80]!r}; it must be a {' or '.join(k.__name__ for k in kinds)}")
    return value


def seconds(body: Mapping[str, Any], name: str, default: float | None) -> float | None:
    """A time limit; null is none."""
    value = body.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise UserError(f"{name} is {str(value)[:80]!r}; it must be a number of seconds above 0, or null")
    return float(value)


def texts(body: Mapping[str, Any], name: str) -> dict[str, str]:
    """A mapping of strings to strings."""
    found: dict[str, Any] = take(body, name, dict, {})
    if not all(isinstance(value, str) for value in found.values()):
        raise UserError(f"{name} must map strings to strings")
    return dict(found)


def take_bytes(body: Mapping[str, Any], name: str) -> bytes | None:
    """`name` as text, or `name_base64` as any bytes."""
    encoded = body.get(f"{name}_base64")
    if encoded is not None:
        encoded = take(body, f"{name}_base64", str, "")
        try:
            return base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise UserError(f"{name}_base64 is not base64: {error}") from None
    text = body.get(name)
    return None if text is None else take(body, name, str, "").encode("utf-8", "surrogateescape")


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
