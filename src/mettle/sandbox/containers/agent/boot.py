"""From the first instruction in a container to the agent's loop.

The interpreter starts a second time, with an environment written here: the image's variables must not steer it, and a
key must not stand where code inside could look. They travel in a pipe.

    python3 -I -S -B -c "<BOOT>" <archive> --stdio
    python3 -I -S -B -c "<BOOT>" <archive> --port 8790      (certificate and key in METTLE_AGENT_IDENTITY, as PEM)

On a port both ends prove by TLS that they hold that one key, so that what crosses the network can be neither read nor
changed, and who does not hold it is hung up on.
Invariant: before the first request is taken, nobody else in the container can look into this process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any, Final, NoReturn

from mettle.sandbox.containers.agent.cells import PROGRAMS
from mettle.sandbox.containers.agent.server import Agent, Wire
from mettle.sandbox.zygote import jail, kernel
from mettle.sandbox.zygote.settings import Settings

if TYPE_CHECKING:
    import ssl

IDENTITY_VARIABLE: Final = "METTLE_AGENT_IDENTITY"
_AGAIN: Final = "--again"
_LEASE_S: Final = 60.0
_HANDSHAKE_S: Final = 10.0
_READ_BYTES: Final = 1 << 18
_HELD: Final = (IDENTITY_VARIABLE, "METTLE_AGENT_LEASE_S")
_ENVIRONMENT: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/work",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONSAFEPATH": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MALLOC_ARENA_MAX": "2",
}
# The first start imports nothing of ours: it only hands the image's variables on and starts again without them.
BOOT: Final = f"""
import json, os, sys
reader, writer = os.pipe()
os.set_blocking(writer, False)
held = json.dumps(dict(os.environ)).encode()
if os.write(writer, held) < len(held):
    sys.exit("the image's environment is longer than a pipe")
os.close(writer)
os.set_inheritable(reader, True)
start = "from mettle.sandbox.containers.agent.boot import main; main(sys.argv)"
again = "import sys; sys.path[:0] = [sys.argv[1]]; " + start
command = [sys.executable or "python3", "-s", "-B", "-c", again, *sys.argv[1:], "{_AGAIN}", str(reader)]
os.execve(command[0], command, {_ENVIRONMENT!r})
"""


def main(argv: list[str]) -> NoReturn:
    """The second start: `argv` is the archive, the way to the owner, and where the variables can be read."""
    kernel.set_dumpable(False)
    held = _take_held(int(argv[argv.index(_AGAIN) + 1]))
    sys.path[:] = [path for path in sys.path if path and path != argv[1]]
    sys.argv = ["agent"]
    try:
        _serve(_wire(argv, held), held)
    except BaseException as error:
        print(f"the agent ends: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # and the kernel ends whatever is left in the container


def _take_held(descriptor: int) -> dict[str, str]:
    with os.fdopen(descriptor, "rb") as file:
        held: dict[str, str] = json.load(file)
    return held


def _wire(argv: list[str], held: dict[str, str]) -> Wire:
    """The way to the owner, on descriptors that no op can mistake for its own."""
    if "--stdio" in argv:
        wire: Wire = Pipes(os.dup(0), os.dup(1))
    else:
        wire = Connection(_accept(int(argv[argv.index("--port") + 1]), _trust_only(held[IDENTITY_VARIABLE])))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nothing, stream)
    os.close(nothing)
    return wire


class Pipes:
    """Standard input and output of this process."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        for descriptor in (read_fd, write_fd):
            os.set_blocking(descriptor, False)

    def read(self) -> bytes | None:
        with contextlib.suppress(BlockingIOError):
            return os.read(self.read_fd, _READ_BYTES)
        return None

    def write(self, data: memoryview) -> int:
        with contextlib.suppress(BlockingIOError):
            return os.write(self.write_fd, data)
        return 0


class Connection:
    """A TLS connection."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        from ssl import SSLWantReadError, SSLWantWriteError

        self._connection = connection
        self._waits = (SSLWantReadError, SSLWantWriteError)
        self.read_fd = self.write_fd = connection.fileno()
        connection.setblocking(False)

    def read(self) -> bytes | None:
        with contextlib.suppress(*self._waits):
            return self._connection.recv(_READ_BYTES)
        return None

    def write(self, data: memoryview) -> int:
        with contextlib.suppress(*self._waits):
            return self._connection.send(data)
        return 0


def _trust_only(identity: str) -> ssl.SSLContext:
    """TLS in which both ends show this certificate, and no other is taken."""
    import ssl  # 40 ms, which only those on a port need

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=identity)
    path = f"/tmp/.{os.urandom(8).hex()}"  # the library reads files only, and nobody else is here yet
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(identity)
    context.load_cert_chain(path)
    os.unlink(path)
    return context


def _accept(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Wait for the one connection that has the key. Whoever does not is hung up on and can try again."""
    try:
        listener = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError:
        listener = socket.create_server(("0.0.0.0", port))
    with listener:
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.settimeout(_HANDSHAKE_S)
            try:
                return context.wrap_socket(connection, server_side=True)
            except OSError:
                connection.close()


def _serve(wire: Wire, held: dict[str, str]) -> None:
    jail.forget_signals()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with contextlib.suppress(OSError):
        kernel.renounce_new_privileges()
    if os.getpid() != 1:
        kernel.adopt_orphans()
    os.umask(0o022)
    with contextlib.suppress(OSError):
        os.chdir("/work")
    image = {name: value for name, value in held.items() if name not in _HELD}
    gc.collect()
    gc.freeze()
    Agent(wire, _settings(), image, float(held.get("METTLE_AGENT_LEASE_S", _LEASE_S))).serve()


def _settings() -> Settings:
    """Those of workers. Whoever is not process 1 sees other processes beside its own."""
    given: dict[str, Any] = {
        name: (() if "tuple" in str(kind) else 0) for name, kind in Settings.__annotations__.items()
    }
    return Settings(**{**given, "is_jailed": os.getpid() == 1, "scratch": PROGRAMS})
