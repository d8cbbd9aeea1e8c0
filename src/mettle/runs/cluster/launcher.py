"""The processes of a run on a Ray cluster, for its supervisor: those with a bundle on nodes, the rest here.

Parts: `Cluster` (the connection: a child that talks to Ray, see `agent`), `RayLauncher`, `PlacedProcess`. What is
placed on the owner's node because it writes the run, and needs no resources of its own (orchestrator, page), is a child
of the supervisor. Invariant: nothing here waits for the cluster but `connect` and `reserve`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from mettle.errors import ServiceError, UserError
from mettle.extras import install_line
from mettle.processes.beats import decode_beat, write_beat
from mettle.processes.child import THREAD_ENVIRONMENT, ChildProcess, python_module
from mettle.processes.frames import receive, send
from mettle.processes.managed import ProcessSpec
from mettle.processes.ready_file import ReadyFile
from mettle.runs.cluster.actor import HOST_MARK
from mettle.runs.cluster.placement import APART, TRAINER, NodeBundle, NodeRoom, Placement, kind_of, place, placement_of
from mettle.runs.config import RayConfig, RunConfig
from mettle.runs.host import HostNews
from mettle.runs.launcher import Launcher, LocalLauncher, SupervisedProcess
from mettle.runs.machine import HostMachine, ThisMachine
from mettle.storage.run_dir import RunDir

CONNECT_S: Final = 90.0
RESERVE_S: Final = 180.0
END_S: Final = 5.0
POLL_S: Final = 0.05
CANNOT: Final = 3
PASSED: Final = ("METTLE_", "HF_", "NCCL_", "GLOO_", "TORCH_")
"""Environment variables of the supervisor that its processes on nodes get, by how they begin."""


class ClusterLine(Protocol):
    """What a launcher needs of a connection: to have things done, and to hear what became of them."""

    config: RayConfig
    lost: str | None
    on_word: Callable[[Mapping[str, Any]], None]

    @property
    def owner_address(self) -> str:
        """Where other nodes reach this one."""
        ...

    def tell(self, word: Mapping[str, Any]) -> None: ...


class Cluster:
    """A connection to a Ray cluster, for as long as the block lasts.

    Raises: UserError without ray installed, ServiceError when no cluster answers.
    """

    def __init__(self, config: RayConfig, log: Path | None = None) -> None:
        self.config = config
        self._log = log
        self._heard = threading.Condition()
        self._answers: dict[str, Any] = {}
        self.on_word: Callable[[Mapping[str, Any]], None] = lambda word: None
        self.lost: str | None = None

    def __enter__(self) -> Cluster:
        _need_ray()
        ours, theirs = socket.socketpair()
        self._line = ours
        environment = {
            "RAY_gcs_rpc_server_reconnect_timeout_s": f"{self.config.head_loss_s:.0f}",
            "RAY_USAGE_STATS_ENABLED": "0",
            **THREAD_ENVIRONMENT,
        }
        with theirs:
            self._child = ChildProcess(
                python_module("mettle.runs.cluster.agent", str(theirs.fileno())),
                tie="pipe", output=self._log or Path(os.devnull), environment=environment,
                pass_fds=[theirs.fileno()],
            )  # fmt: skip
        threading.Thread(target=self._listen, name="cluster", daemon=True).start()
        try:
            self._ask("connected", {"do": "connect", "address": self.config.address}, CONNECT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)  # it ends when nobody listens to it
        self._child.wait(END_S)
        self._child.kill()
        self._line.close()

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that lived when the connection was made, with what they had free."""
        return list(self._answers["connected"]["nodes"])

    @property
    def owner_address(self) -> str:
        """The address of this node in the cluster."""
        return str(self._answers["connected"]["address"])

    def reserve(self, placement: Placement) -> None:
        """Take what the run needs, or nothing. Raises: UserError in one line where there is no room."""
        pools = {name: [dataclasses.asdict(bundle) for bundle in pool] for name, pool in placement.pools.items()}
        self._ask("reserved", {"do": "reserve", "pools": pools}, RESERVE_S)

    def tell(self, word: Mapping[str, Any]) -> None:
        """Have something done."""
        try:
            send(self._line, word)
        except OSError:
            self._lose()

    def _ask(self, answer: str, word: Mapping[str, Any], timeout_s: float) -> None:
        self.tell(word)
        with self._heard:
            came = self._heard.wait_for(lambda: {answer, "refused"} & self._answers.keys() or self.lost, timeout_s)
        if (refused := self._answers.pop("refused", None)) is not None:
            raise (UserError if refused[1] == UserError.exit_code else ServiceError)(refused[0])
        if not came or self.lost:
            raise ServiceError(self.lost or f"the Ray cluster at {self.config.address} did not answer in time")

    def _listen(self) -> None:
        while True:
            try:
                word = receive(self._line)
            except OSError:
                word = None
            with self._heard:
                if word is None:
                    self._lose()
                    self._heard.notify_all()
                    return
                for key in ("connected", "reserved"):
                    if key in word:
                        self._answers[key] = {"nodes": word[key]} if key == "reserved" else word[key]
                if "refused" in word:
                    self._answers["refused"] = (word["refused"], word["code"])
                self._heard.notify_all()
            self.on_word(word)

    def _lose(self) -> None:
        self.lost = self.lost or (
            f"the head of the Ray cluster at {self.config.address} is gone; start it, then resume the run"
        )


def check_room(config: RunConfig) -> dict[str, NodeRoom]:
    """The node that each process of the run could have now.

    Raises: UserError in one line when the cluster has no room; ServiceError when there is no cluster.
    """
    with Cluster(config.deployment.ray) as cluster:
        return place(placement_of(config).bundles, [NodeRoom(**node) for node in cluster.nodes])


class RayLauncher:
    """Makes the processes of a run whose `placement` is reserved on `cluster`."""

    def __init__(
        self,
        cluster: ClusterLine,
        placement: Placement,
        run_dir: RunDir,
        *,
        beside: Launcher | None = None,
        machine: HostMachine | None = None,
    ) -> None:
        self.cluster = cluster
        self.machine = machine or ThisMachine()
        self._beside = beside or LocalLauncher(run_dir.logs)
        self.run_dir = run_dir
        self._bundles = {bundle.process: bundle for bundle in placement.bundles}
        self._placed: dict[str, PlacedProcess] = {}
        self._brought: dict[tuple[str, str], set[str]] = {}
        """Who beats on a node, by process and member of it."""
        self._news: list[HostNews] = []
        cluster.on_word = self._hear

    def process(self, spec: ProcessSpec) -> SupervisedProcess:
        """On a node when it has a bundle; the warm-up takes that of the trainer, which starts after it."""
        members = self._members(spec.name)
        if not members:
            arguments = tuple(one.replace(HOST_MARK, self.cluster.owner_address) for one in spec.arguments)
            return self._beside.process(dataclasses.replace(spec, arguments=arguments))
        output = self.run_dir.logs / f"{spec.name}.out"
        self._placed[spec.name] = PlacedProcess(spec, members, output, self)
        return self._placed[spec.name]

    def _members(self, name: str) -> list[tuple[str, NodeBundle]]:
        if name in ("sft", "policy"):
            return [(name, self._bundles[TRAINER])]
        if name == TRAINER:
            return [(n, b) for n, b in self._bundles.items() if n == TRAINER or n.startswith(f"{TRAINER}-")]
        return [(name, self._bundles[name])] if name in self._bundles else []

    def can_start(self, spec: ProcessSpec) -> bool:
        """Each begins by itself; whether there is a place shows when it has been started."""
        return True

    def pids(self) -> list[int]:
        """What a cluster runs beside a run is the cluster's."""
        return []

    def news(self) -> list[HostNews]:
        """Where processes were placed, and which of them wait for a place."""
        found, self._news = self._news, []
        return found

    def note(self, text: str, **data: float) -> None:
        """Have something told."""
        self._news.append(HostNews("place", text, data))

    def may_wait(self, name: str) -> bool:
        """An engine, a place for workers or a sandbox service may wait for room for ever while another one answers."""
        others = [p for n, p in self._placed.items() if kind_of(n) == kind_of(name) and n != name]
        return kind_of(name) in APART and any(process.is_ready() for process in others)

    def close(self) -> None:
        """The connection ends with its block, and with it all that was placed."""

    def _hear(self, word: Mapping[str, Any]) -> None:
        process = self._placed.get(str(word.get("name")))
        if process is None:
            return
        if "beats" in word:
            self._bring(word["beats"], str(word["host"]), (str(word["name"]), str(word["member"])))
        else:
            process.hear(word)

    def _bring(self, texts: Sequence[str], host: str, of: tuple[str, str]) -> None:
        """Write the beats of a node down beside those of this one, in its time. Who is gone there is gone here."""
        now = self.machine.now()
        brought = set()
        for text in texts:
            beat = decode_beat(text.encode())
            if beat is None:
                continue
            write_beat(self.run_dir.beats, dataclasses.replace(beat.shifted(now), host=host))
            brought.add(beat.name)
        self._forget(self._brought.get(of, set()) - brought)
        self._brought[of] = brought

    def forget_beats(self, process: str) -> None:
        """A process has ended, with all that it has started."""
        for of in [of for of in self._brought if of[0] == process]:
            self._forget(self._brought.pop(of))

    def _forget(self, names: Collection[str]) -> None:
        for name in names:
            (self.run_dir.beats / f"{name}.beat").unlink(missing_ok=True)


class PlacedProcess:
    """A process on a node, or on several nodes when it has several members, which start and end together."""

    def __init__(
        self, spec: ProcessSpec, members: Sequence[tuple[str, NodeBundle]], output: Path, launcher: RayLauncher
    ) -> None:
        self.spec = spec
        self._ready = ReadyFile(spec.ready_file)
        self.pid: int | None = None
        self.host = "the cluster"
        self._members = members
        self._pool = TRAINER if members[0][1].process.startswith(TRAINER) else spec.name
        self._output = output
        self._launcher = launcher
        self._life = 0
        self._asked_at = self._placed_at = 0.0
        self._state = "waiting"
        self._code: int | None = None
        self._line = ""
        self._is_told = False

    @property
    def started_at(self) -> float:
        return self._placed_at if self._state in ("running", "ended") else self._launcher.machine.now()

    def start(self) -> None:
        """Ask for it; it starts once it has a place."""
        self._ready.prepare()
        self._life += 1
        self._state, self._code, self._line, self._is_told = "placing", None, "", False
        self._asked_at = self._launcher.machine.now()
        passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
        spec = {
            "name": self.spec.name, "module": self.spec.module, "arguments": list(self.spec.arguments),
            "environment": {**passed, **self.spec.environment},
        }  # fmt: skip
        members = [{"name": name, "bundle": dataclasses.asdict(bundle)} for name, bundle in self._members]
        self._launcher.cluster.tell(
            {
                "do": "start",
                "pool": self._pool,
                "spec": spec,
                "members": members,
                "output": str(self._output),
                "life": self._life,
                "run_dir": str(self._launcher.run_dir.path),
            }
        )

    def hear(self, word: Mapping[str, Any]) -> None:
        """In the thread that listens to the agent: what has become of this life."""
        if word["life"] != self._life or self._state == "ended":  # it had given up before
            return
        if word["state"] == "running":
            places = [place["host"] for place in word["places"]]
            self.pid, self.host, self._placed_at = (
                word["pid"],
                ",".join(dict.fromkeys(places)),
                self._launcher.machine.now(),
            )
            self._launcher.note(f"{self.spec.name} runs on {', '.join(places)}")
        elif word["state"] == "ended":
            self._code, self._line = word["code"], word["line"]
            self._placed_at = self._placed_at or self._launcher.machine.now()
            self._launcher.forget_beats(self.spec.name)
            if word["code"] < 0 and word["line"]:
                self._launcher.note(f"{self.spec.name} on {self.host} is lost: {word['line']}")
        self._state = word["state"]

    def exit_code(self) -> int | None:
        """None while it runs or waits for a place; 3 when the cluster is gone, or has had no room for too long."""
        if self._code is None and self._state != "waiting" and self._launcher.cluster.lost:
            self._state, self._code, self._line = "ended", CANNOT, self._launcher.cluster.lost
        if self._state == "placing":
            self._wait_for_room(self._launcher.machine.now() - self._asked_at)
        return self._code

    def _wait_for_room(self, waited_s: float) -> None:
        limit_s = self._launcher.cluster.config.wait_for_room_s
        wants = ", ".join(str(bundle) for _, bundle in self._members)
        if waited_s > min(limit_s, 15.0) and not self._is_told:
            self._is_told = True
            self._launcher.note(f"{self.spec.name} waits for a node with room for {wants}", age_s=round(waited_s))
        if waited_s > limit_s and not self._launcher.may_wait(self.spec.name):
            self._state, self._code = "ended", CANNOT
            self._line = f"no node of the Ray cluster has had room for {wants} for {waited_s:.0f} s; add one and resume"
            self._tell_signal(int(signal.SIGKILL))  # else it may get the room of those that end with it

    def endpoint(self) -> dict[str, Any] | None:
        """What the ready file says, once this life has written it."""
        return self._ready.endpoint() if self._state == "running" else None

    def remove_ready_file(self) -> None:
        """Nobody answers at that address."""
        self._ready.remove()

    def is_ready(self) -> bool:
        """True when it runs and, if it is a server, has said that it can answer."""
        return self._state == "running" and self._ready.is_satisfied

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every member and its children."""
        if self._code is None and self._state != "waiting":
            self._tell_signal(int(number))

    def _tell_signal(self, number: int) -> None:
        word = {"do": "signal", "name": self.spec.name, "life": self._life, "number": number}
        self._launcher.cluster.tell(word)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end; None when it has not come in time."""
        deadline = self._launcher.machine.now() + (float("inf") if timeout_s is None else timeout_s)
        while self.exit_code() is None and self._launcher.machine.now() < deadline:
            self._launcher.machine.sleep(POLL_S)
        return self._code

    def last_line(self) -> str:
        """The line that says why it ended."""
        return self._line


def _need_ray() -> None:
    import importlib.util

    if importlib.util.find_spec("ray") is None:
        raise UserError(f"deployment.engine 'ray' needs ray, which is not installed: {install_line('ray')}")
