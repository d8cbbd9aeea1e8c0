"""What is planted on the host for the attacks to find, and a look at it afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOKEN_NAME = "METTLE_ATTACK_TOKEN"
SECRET = "the-planted-secret-5b1c"


@dataclass
class Planted:
    """Things on the host that no judged code may see or touch."""

    directory: Path
    decoy: subprocess.Popen[bytes]
    listeners: list[socket.socket]
    abstract: str

    def describe(self) -> str:
        """The line that every attack gets on its standard input."""
        described = {
            "directory": str(self.directory),
            "secret_file": str(self.directory / "secret"),
            "socket_file": str(self.directory / "socket"),
            "straggler": self.straggler,
            "nodename": os.uname().nodename,
            "leftover": str(self.leftover),
            "token_name": TOKEN_NAME,
            "decoy_pid": self.decoy.pid,
            "port": self.listeners[0].getsockname()[1],
            "abstract": self.abstract,
            "abstract_datagram": f"{self.abstract}-datagram",
        }
        return json.dumps(described) + "\n"

    @property
    def straggler(self) -> str:
        """A name for processes that is these tests' own: others may run beside them."""
        return f"mettle-{self.decoy.pid}-"

    @property
    def leftover(self) -> Path:
        return Path(f"/tmp/{self.abstract}-leftover")

    def damage(self) -> list[str]:
        """What has happened to the host; empty when it is as it was."""
        found = []
        if self.decoy.poll() is not None:
            found.append("the decoy process was killed")
        if sorted(path.name for path in self.directory.iterdir()) != ["secret", "socket"]:
            found.append("the planted directory was changed")
        if self.leftover.exists():
            found.append("a file was left in /tmp")
        found += [
            f"a connection reached {listener.getsockname()}" for listener in self.listeners if _was_reached(listener)
        ]
        found += [f"process {pid} was left behind" for pid in stragglers(self.straggler)]
        return found


def stragglers(name: str = "mettle-straggle") -> list[int]:
    """Processes that an attack gave a telltale name, which the kernel cuts at 15 letters."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            before, _, rest = Path(f"/proc/{entry}/stat").read_text().rpartition(")")
            if f"({name}" in before and rest.split()[0] not in "ZX":  # the dead wait for whoever adopted them
                found.append(int(entry))
    return found


def _was_reached(listener: socket.socket) -> bool:
    try:
        if listener.type == socket.SOCK_DGRAM:
            listener.recv(16)
        else:
            listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def plant(directory: Path) -> Iterator[Planted]:
    """Put everything in place, and take it away again."""
    directory.chmod(0o777)
    (directory / "secret").write_text(SECRET)
    abstract = f"mettle-attack-{os.getpid()}-{directory.name}"
    tcp, stream, named, datagram = (
        socket.socket(),
        socket.socket(socket.AF_UNIX),
        socket.socket(socket.AF_UNIX),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
    )
    here = os.open(directory, os.O_PATH)  # the name of a socket is short, and that of a test's directory is not
    named.bind(f"/proc/self/fd/{here}/socket")
    os.close(here)
    (directory / "socket").chmod(0o777)
    tcp.bind(("127.0.0.1", 0))
    stream.bind("\0" + abstract)
    datagram.bind(f"\0{abstract}-datagram")
    for listener in (tcp, stream, named, datagram):
        listener.setblocking(False)
        if listener is not datagram:
            listener.listen()
    decoy = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(600)", "mettle-decoy"],
        env={TOKEN_NAME: SECRET},
    )
    while b"mettle-decoy" not in Path(f"/proc/{decoy.pid}/cmdline").read_bytes():
        pass  # the kernel writes it down a moment after the program has begun
    planted = Planted(directory, decoy, [tcp, stream, named, datagram], abstract)
    try:
        yield planted
    finally:
        decoy.kill()
        decoy.wait()
        planted.leftover.unlink(missing_ok=True)
        for listener in planted.listeners:
            listener.close()
