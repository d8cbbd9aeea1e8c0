"""A worker of a machine: the process, forked by its process 1, that carries out one order and ends.

`run` becomes the parent of a command: whatever the command starts, however it detaches itself, stays below the worker
while the command runs, so that a deadline can end all of it. `put`, `get`, `list`, `pack` and `unpack` move files
between a descriptor of the owner's and the file system that the code sees, as the user that the code is: no path leads
out, because there is no way out.
Invariant: the exit status is the command's (128 + signal, as in a shell), or for files 0 or the number of the error.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import stat
import struct
import traceback
from collections.abc import Callable, Iterator
from typing import IO, Any, Final, NoReturn

from mettle.sandbox.zygote import archives, jail, kernel
from mettle.sandbox.zygote.settings import MachineLimits, Settings

_COMMAND_NOT_RUN: Final = 126
_COMMAND_NOT_FOUND: Final = 127
_COPY_BYTES: Final = 1 << 16
_MAX_ENTRIES: Final = 100_000
_SPARE_DATA_BYTES: Final = 256 << 20
# Python ignores these, and a program does not expect to start with them ignored.
_DEFAULTED: Final = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
_LENGTH: Final = struct.Struct(">I")

Order = dict[str, Any]


def live(order: Order, descriptors: list[int], settings: Settings, limits: MachineLimits, root: str) -> NoReturn:
    """The worker's whole life. `root` is where /work is when there is no jail."""
    status = errno.EIO
    try:
        kernel.die_with_parent()
        os.setsid()
        _arrange(descriptors, order["streams"], keeps_log=order["op"] != "run")
        status = _WORK[order["op"]](order, limits, root)
    except BrokenPipeError:
        status = errno.EPIPE
    except OSError as error:
        status = error.errno or errno.EIO
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status & 0xFF)


def _arrange(descriptors: list[int], streams: list[int], *, keeps_log: bool) -> None:
    """Put the owner's descriptors where they belong, nothing where none was sent, and close the rest."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    high = [_above_streams(descriptor) for descriptor in descriptors]
    for stream in range(2 if keeps_log else 3):
        os.dup2(high[streams.index(stream)] if stream in streams else nothing, stream, inheritable=True)
    os.closerange(3, 1 << 16)


def _above_streams(descriptor: int) -> int:
    return descriptor if descriptor > 2 else os.dup(descriptor)


def resolve(path: str, root: str) -> str:
    """A path as this worker opens it: relative ones from /work, which without a jail is a directory of the host."""
    path = os.path.join("/work", path)
    if root and (path == "/work" or path.startswith("/work/")):
        return root + path
    return path


def _run(order: Order, limits: MachineLimits, root: str) -> int:
    kernel.adopt_orphans()
    argv: list[str] = order["argv"]
    environment = _environment(order, limits, root)
    os.environ["PATH"] = environment.get("PATH", "")  # where the command is looked for
    try:
        os.chdir(resolve(order["cwd"], root))
        _lower_limits(limits, is_jailed=not root)
        pid = os.posix_spawnp(argv[0], argv, environment, setsid=True, setsigdef=_DEFAULTED, setsigmask=())
    except (OSError, ValueError) as error:
        is_missing = isinstance(error, FileNotFoundError) and error.filename == argv[0]
        os.write(2, f"{argv[0][:200]}: {error}\n".encode(errors="replace"))
        return _COMMAND_NOT_FOUND if is_missing else _COMMAND_NOT_RUN
    os.closerange(0, 3)
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code


def _environment(order: Order, limits: MachineLimits, root: str) -> dict[str, str]:
    environment = {**limits.environment, **order["environment"]}
    if root:
        environment = {"HOME": f"{root}/work", "TMPDIR": f"{root}/tmp", **environment}
    return environment


def _lower_limits(limits: MachineLimits, *, is_jailed: bool) -> None:
    """The command's own limits; process 1 keeps room to start workers."""
    if is_jailed and limits.max_processes:  # 0 where the user is not the machine's alone, so that others would count
        jail.lower(resource.RLIMIT_NPROC, limits.max_processes + 1)
    jail.lower(resource.RLIMIT_DATA, limits.memory_bytes + _SPARE_DATA_BYTES)


def _put(_: Order, __: MachineLimits, root: str) -> int:
    """Write the files that come in, one after the other: a header, then as many bytes as it says."""
    with os.fdopen(0, "rb", buffering=_COPY_BYTES, closefd=False) as stream:
        for header in _headers(stream):
            path = resolve(header["path"], root)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            _write_file(path, stream, header["size"], header["mode"])
    return 0


def _headers(stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    while length := stream.read(_LENGTH.size):
        yield json.loads(stream.read(_LENGTH.unpack(length)[0]))


def _write_file(path: str, stream: IO[bytes], num_bytes: int, mode: int) -> None:
    # Without O_NONBLOCK a fifo that the code has put there would hold this worker for ever.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        _require_file(descriptor)
        while num_bytes > 0:
            data = stream.read(min(_COPY_BYTES, num_bytes))
            if not data:
                raise OSError(errno.EPIPE, "the owner sent less than it said")
            file.write(data)
            num_bytes -= len(data)
        os.fchmod(descriptor, mode)


def _require_file(descriptor: int) -> None:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "a directory")
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a file")


def _get(order: Order, _: MachineLimits, root: str) -> int:
    descriptor = os.open(resolve(order["path"], root), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    _require_file(descriptor)
    while data := os.read(descriptor, _COPY_BYTES):
        _write_all(data)
    return 0


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def _list(order: Order, _: MachineLimits, root: str) -> int:
    with os.scandir(resolve(order["path"], root)) as entries:
        for number, entry in enumerate(entries):
            if number == _MAX_ENTRIES:
                return errno.E2BIG
            found = entry.stat(follow_symlinks=False)
            line = [entry.name, _kind(found.st_mode), found.st_size, stat.S_IMODE(found.st_mode), found.st_mtime]
            _write_all(json.dumps(line).encode() + b"\n")
    return 0


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "link" if stat.S_ISLNK(mode) else "other"


def _pack(order: Order, _: MachineLimits, root: str) -> int:
    with os.fdopen(1, "wb", closefd=False) as stream:
        archives.pack([(path, resolve(path, root)) for path in order["paths"]], stream)
    return 0


def _unpack(_: Order, __: MachineLimits, root: str) -> int:
    with os.fdopen(0, "rb", closefd=False) as stream:
        archives.unpack(stream, lambda name: resolve(f"/{name}", root))
    return 0


_WORK: Final[dict[str, Callable[[Order, MachineLimits, str], int]]] = {
    "run": _run,
    "put": _put,
    "get": _get,
    "list": _list,
    "pack": _pack,
    "unpack": _unpack,
}
