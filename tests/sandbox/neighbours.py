"""A machine with something in it to find: a file, a process, a server and an abstract socket."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

from mettle.sandbox import Machine

NEIGHBOUR_PROGRAM = """
import os, socket, sys, time
name = sys.argv[1]
open(name + ".secret", "w").close(); open("/dev/shm/" + name, "w").close()
server = socket.create_server(("127.0.0.1", 0))
abstract = socket.socket(socket.AF_UNIX); abstract.bind("\\0" + name); abstract.listen()
print(server.getsockname()[1], os.getcwd(), flush=True)
server.accept() if len(sys.argv) > 2 else time.sleep(60)
"""


@dataclass
class Neighbour:
    """Another machine with something in it to find."""

    machine: Machine
    described: str

    @classmethod
    async def move_in(cls, machine: Machine) -> Neighbour:
        name = f"mettle-neighbour-{machine.id}"
        await machine.upload("neighbour.py", NEIGHBOUR_PROGRAM)
        job = await machine.start(["python3", "neighbour.py", name])
        while not (said := (await job.output()).stdout).endswith("\n"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        port, directory = said.split()
        described = {"file": f"{name}.secret", "process": name, "name": name, "server": int(port)}
        described["directory"] = directory  # as the neighbour itself names it
        return cls(machine, json.dumps(described) + "\n")

    async def is_unharmed(self) -> bool:
        found = await self.machine.exec("ls *.secret && pgrep -f neighbour.py || ps -ef")
        return found.exit_code == 0 and ".secret" in found.stdout

    async def move_out(self) -> None:
        """Delete it, and what it leaves where nothing isolates it."""
        await self.machine.delete()
        Path("/dev/shm", json.loads(self.described)["name"]).unlink(missing_ok=True)  # noqa: ASYNC240
