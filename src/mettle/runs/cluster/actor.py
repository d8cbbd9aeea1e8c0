"""What runs on a node of the cluster: an actor that starts one process of a run there and says how it fares.

The process is the same command as on one machine, tied to the actor's life. It beats into a folder of its node; its
beats are brought to the supervisor with each `look`, their times as ages, because no two machines share a clock.
Invariant: with the actor, its process ends.
"""

from __future__ import annotations

import dataclasses
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from mettle.processes.beats import BEATS_FOLDER, encode_beat, read_beats
from mettle.processes.child import import_path, process_state
from mettle.processes.managed import ManagedProcess, ProcessSpec
from mettle.runs.ports import free_port

HOST_MARK = "{host}"
"""In the arguments of a command: the address of the node that it is placed on."""


class PlacedCommand:
    """One process on this node. Ray makes it in a process of its own, whose main thread runs every call."""

    def __init__(self, address: str = "", node: str = "") -> None:
        self._address = address or _address_of_node()
        self._node = node or _name_of_node()
        self._process: ManagedProcess | None = None
        self._beats = Path(tempfile.mkdtemp(prefix="mettle-beats-"))
        self._name = ""

    def where(self, folder: str) -> dict[str, Any]:
        """This node, a port that is free on it, and whether it sees the run's `folder`."""
        return {
            "host": self._node,
            "address": self._address,
            "port": free_port(self._address),
            "sees_run": (Path(folder) / "run.toml").exists(),
        }

    def start(self, fields: dict[str, Any], output: str) -> int:
        """Start the process of a spec; returns its pid."""
        self._name = fields["name"]
        arguments = tuple(str(one).replace(HOST_MARK, self._address) for one in fields["arguments"])
        environment = {**fields["environment"], BEATS_FOLDER: str(self._beats), "PYTHONPATH": import_path()}
        spec = ProcessSpec(fields["name"], fields["module"], arguments, environment=environment)
        self._process = ManagedProcess(spec, Path(output))
        self._process.start()
        assert self._process.pid is not None
        return self._process.pid

    def look(self) -> dict[str, Any]:
        """Its exit code, its last line once it has ended, and the beats of all that it has started."""
        assert self._process is not None, "it was started"
        code = self._process.exit_code()
        now = time.monotonic()
        found = read_beats(self._beats)
        for name in [name for name, beat in found.items() if not process_state(beat.pid)]:  # killed: it left its beat
            del found[name]
            (self._beats / f"{name}.beat").unlink(missing_ok=True)
        beats = [
            # The process itself beats under the name that the supervisor knows it by.
            encode_beat(
                dataclasses.replace(beat.shifted(-now), name=self._name if self._is_it(beat.pid) else beat.name)
            )
            for beat in found.values()
        ]
        return {"code": code, "line": self._process.last_line() if code and code > 0 else "", "beats": beats}

    def _is_it(self, pid: int) -> bool:
        return self._process is not None and pid == self._process.pid

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children."""
        if self._process is not None:
            self._process.signal(signal.Signals(number))

    def end(self) -> None:
        """End it, and leave nothing on the node."""
        if self._process is not None:
            self._process.end(grace_s=0.0)
        shutil.rmtree(self._beats, ignore_errors=True)


def _address_of_node() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _name_of_node() -> str:
    """Its host, and what tells it from other nodes there."""
    import ray

    return f"{socket.gethostname()}/{ray.get_runtime_context().get_node_id()[:6]}"
