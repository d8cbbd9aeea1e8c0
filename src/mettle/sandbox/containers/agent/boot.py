"""From the first instruction in a container to the agent's loop.

The interpreter starts a second time, with an environment written here: the image's variables must not steer it, and a
token must not stand where code inside could look. They travel in a pipe.

    python3 -I -S -B -c "<BOOT>" <archive> --stdio
    python3 -I -S -B -c "<BOOT>" <archive> --port 8790      (the token in METTLE_AGENT_TOKEN)

Invariant: before the first order is taken, nobody else in the container can look into this process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import time
from typing import Any, Final, NoReturn

from mettle.sandbox.containers.agent.cells import PROGRAMS
from mettle.sandbox.containers.agent.machine import Agent
from mettle.sandbox.containers.agent.seal import NONCE_BYTES, Seal
from mettle.sandbox.containers.agent.wire import Wire
from mettle.sandbox.zygote import jail, kernel
from mettle.sandbox.zygote.settings import Settings

TOKEN_VARIABLE: Final = "METTLE_AGENT_TOKEN"
_AGAIN: Final = "--again"
_LEASE_S: Final = 60.0
_HELLO_S: Final = 10.0
_HELD: Final = ("METTLE_AGENT_TOKEN", "METTLE_AGENT_LEASE_S")
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
        wire = _wire(argv, held)
        if wire is not None:
            _serve(wire, held)
    except BaseException as error:
        print(f"the agent ends: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # and the kernel ends whatever is left in the container


def _take_held(descriptor: int) -> dict[str, str]:
    with os.fdopen(descriptor, "rb") as file:
        held: dict[str, str] = json.load(file)
    return held


def _wire(argv: list[str], held: dict[str, str]) -> Wire | None:
    """The way to the owner, on descriptors that no hand can mistake for its own."""
    if "--stdio" in argv:
        wire = Wire(os.dup(0), os.dup(1))
    else:
        token = bytes.fromhex(held[TOKEN_VARIABLE])
        accepted = _accept(int(argv[argv.index("--port") + 1]), token)
        if accepted is None:
            return None
        wire = accepted
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nothing, stream)
    os.close(nothing)
    return wire


def _accept(port: int, token: bytes) -> Wire | None:
    """Wait for the one connection that knows the token. Whoever does not is hung up on and can try again."""
    try:
        listener = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError:
        listener = socket.create_server(("0.0.0.0", port))
    with listener:
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            seal = Seal(token, is_owner=False)
            if _has_proved_itself(connection, seal):
                descriptor = connection.detach()
                return Wire(descriptor, descriptor, seal)
            connection.close()


def _has_proved_itself(connection: socket.socket, seal: Seal) -> bool:
    """Exchange nonces, then expect one record, `hello`, that only who knows the token can have made."""
    deadline = time.monotonic() + _HELLO_S
    opened = b""
    try:
        connection.settimeout(_HELLO_S)
        connection.sendall(seal.hello)
        while opened != b"hello":
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            data = connection.recv(NONCE_BYTES + 128)
            opened += seal.open(data)
            if not data or len(opened) > len(b"hello") or time.monotonic() > deadline:
                return False
    except (OSError, ValueError):
        return False
    return True


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
    """Those of hands. Whoever is not process 1 sees other processes beside its own."""
    given: dict[str, Any] = {
        name: (() if "tuple" in str(kind) else 0) for name, kind in Settings.__annotations__.items()
    }
    return Settings(**{**given, "is_jailed": os.getpid() == 1, "scratch": PROGRAMS})
