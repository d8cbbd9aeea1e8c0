"""Files into a container and out of it: each way is one op of process 1, with a pipe to it.

Invariant: an op that nobody waits for any more is ended.
"""

from __future__ import annotations

import errno
import json
import os
from typing import Any, Final

from mettle.sandbox.containers.agent.commands import Host, Op, read, write
from mettle.sandbox.containers.agent.http import Request

_MAX_LIST_BYTES: Final = 64 << 20
_FIRST_SIGNAL: Final = 133  # error numbers end here
_ENTRY: Final = ("name", "kind", "num_bytes", "mode", "modified")


class FileRoutes:
    """The routes of a machine's files."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def give(self, request: Request, kind: str) -> None:
        """The body into an op, which writes files."""
        op, [descriptor] = self._host.start_op({"op": kind}, [0])
        try:
            is_wanted = True
            async for piece in request.body():
                if is_wanted:
                    try:
                        await write(descriptor, piece)
                    except BrokenPipeError:  # the op has met an error, which its status names
                        is_wanted = False
            os.close(descriptor)
            descriptor = -1
            await op.ended.wait()
        finally:
            self._end_op(op, descriptor)
        _check(op, "the upload")
        await request.answer({}, 201)

    async def get(self, request: Request) -> None:
        path = request.one("path", "")
        await self._send_output(request, {"op": "get", "path": path}, path)

    async def snapshot(self, request: Request) -> None:
        paths = request.query.get("path", ["/work"])
        await self._send_output(request, {"op": "pack", "paths": paths}, " ".join(paths))

    async def _send_output(self, request: Request, order: dict[str, Any], what: str) -> None:
        """What an op prints, as it comes. One that fails before it has printed is an error, and later the end."""
        op, [descriptor] = self._host.start_op(order, [1])
        try:
            data = await read(descriptor)
            if not data:
                await op.ended.wait()
                _check(op, what)
            await request.begin("application/octet-stream")
            while data:
                await request.send(data)
                data = await read(descriptor)
            await op.ended.wait()
            _check(op, what)
            await request.send(b"")
        finally:
            self._end_op(op, descriptor)

    async def entries(self, request: Request) -> None:
        path = request.one("path", "/work")
        op, [descriptor] = self._host.start_op({"op": "list", "path": path}, [1])
        lines = bytearray()
        try:
            while data := await read(descriptor):
                lines += data
                if len(lines) > _MAX_LIST_BYTES:
                    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
            await op.ended.wait()
        finally:
            self._end_op(op, descriptor)
        _check(op, path)
        found = sorted(json.loads(line) for line in lines.splitlines())
        entries = [{"$record": "Entry", **dict(zip(_ENTRY, entry, strict=True))} for entry in found]
        await request.answer({"entries": entries})

    def _end_op(self, op: Op, descriptor: int) -> None:
        if descriptor >= 0:
            os.close(descriptor)
        if not op.ended.is_set:
            self._host.kill_op(op)


def _check(op: Op, what: str) -> None:
    """Raises: OSError for an op that has failed."""
    status = int(op.answer["status"])
    if status > _FIRST_SIGNAL:
        raise InterruptedError(errno.EINTR, "ended by a process of the machine, or for lack of memory", what)
    if status:
        raise OSError(status, os.strerror(status), what)
