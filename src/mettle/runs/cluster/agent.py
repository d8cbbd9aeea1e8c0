"""`python -m mettle.runs.cluster.agent FD`: the part of a run that talks to Ray, in a process of its own.

Ray ends a process that has lost its cluster, so the supervisor must not be that process. It is told over a socket what
to start and to end, and tells what has become of each. Parts: `RayAgent` (the loop), `PlacedGroup` (a process of one or
several members, each on a node; all end when one does). Invariant: when this process ends, Ray ends all that it has
placed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mettle.errors import MettleError, ServiceError, UserError
from mettle.processes.frames import receive, send
from mettle.processes.orphans import end_with_parent
from mettle.processes.readiness import is_readable
from mettle.runs.cluster.actor import PlacedCommand
from mettle.runs.cluster.placement import NodeBundle, NodeRoom, place

LOOK_S: Final = 0.3
READY_S: Final = 60.0
SEEK_S: Final = 1.0
END_S: Final = 2.0
KILL_S: Final = 5.0
"""A process that was sent SIGKILL, and of which no end is heard for so long, is on a node that does not answer."""
LOST: Final = -signal.SIGKILL
NODE_ID: Final = "ray.io/node-id"


@dataclass(slots=True)
class PlacedMember:
    """One process of a group: its actor, and what is asked of that."""

    name: str
    bundle: NodeBundle
    actor: Any = None
    asked: Any = None
    where: dict[str, Any] | None = None
    pid: int | None = None
    is_started: bool = False
    code: int | None = None


@dataclass(slots=True)
class PlacedGroup:
    """A process as the supervisor knows it, in one of its lives."""

    fields: dict[str, Any]
    output: str
    run_dir: str
    life: int
    pool: str
    members: list[PlacedMember]
    told: str = ""
    next_look: float = 0.0
    next_seek: float = 0.0
    taken_at: float = 0.0
    lost_at: float = float("inf")
    is_over: bool = False

    @property
    def name(self) -> str:
        return str(self.fields["name"])

    def forget(self) -> None:
        """It has no place after all."""
        for member in self.members:
            member.actor = member.asked = member.where = None


class RayAgent:
    """Does what it is told over `line`, until that closes."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._groups: dict[str, PlacedGroup] = {}
        self._pools: dict[str, PlacementGroup] = {}
        self._bundles: dict[str, Sequence[NodeBundle]] = {}
        self._owner = ""

    def run(self) -> None:
        """Obey and tell; returns when the supervisor is gone."""
        while True:
            if is_readable(self._line, LOOK_S / 3):
                word = receive(self._line)
                if word is None:
                    return
                try:
                    self._obey(word)
                except MettleError as error:
                    send(self._line, {"refused": str(error), "code": error.exit_code})
            for group in list(self._groups.values()):
                self._attend(group)

    def _obey(self, word: Mapping[str, Any]) -> None:
        match word["do"]:
            case "connect":
                self._connect(word["address"])
            case "reserve":
                self._reserve({name: [NodeBundle(**one) for one in pool] for name, pool in word["pools"].items()})
            case "start":
                self._start(word)
            case "signal":
                self._signal(word)

    def _signal(self, word: Mapping[str, Any]) -> None:
        group, number = self._groups.get(word["name"]), int(word["number"])
        if group is None or group.life != word["life"] or group.is_over:
            return
        if not all(member.is_started for member in group.members):
            self._group_ended(group, -number, "it waited for a place")
            return
        for member in group.members:
            if member.code is None:
                member.actor.signal.remote(number)
        if number == signal.SIGKILL:
            group.lost_at = time.monotonic() + KILL_S

    # The cluster

    def _connect(self, address: str) -> None:
        try:
            ray.init(address=address, logging_level="ERROR", log_to_driver=False, namespace="mettle")
        except (ConnectionError, RuntimeError, ValueError) as error:
            first = (str(error).splitlines() or ["no reason given"])[0]
            raise ServiceError(
                f"no Ray cluster answers at {address}: {first}; `ray start --head` starts one, and"
                " deployment.ray.address names it"
            ) from error
        self._owner = ray.get_runtime_context().get_node_id()
        address = ray.util.get_node_ip_address()
        nodes = [_shown(room) for room in self._rooms()]
        send(self._line, {"connected": {"ray": ray.__version__, "address": address, "nodes": nodes}})

    def _rooms(self) -> list[NodeRoom]:
        # Ray has no public call for what is free on each node without its dashboard.
        free = ray._private.state.available_resources_per_node()
        found = []
        for node in ray.nodes():
            if node["Alive"]:
                has = free.get(node["NodeID"], {})
                name = f"{node['NodeManagerHostname']}/{node['NodeID'][:6]}"
                is_owner = node["NodeID"] == self._owner
                found.append(NodeRoom(name, has.get("CPU", 0.0), has.get("GPU", 0.0), is_owner, node["NodeID"]))
        return found

    def _reserve(self, pools: Mapping[str, Sequence[NodeBundle]]) -> None:
        """Take all that the run needs, or nothing. Raises: UserError where the cluster has no room."""
        rooms = self._rooms()
        places = place([bundle for pool in pools.values() for bundle in pool], rooms)
        self._bundles = dict(pools)
        for name, bundles in pools.items():
            self._take(name, bundles, places)
        for name, bundles in pools.items():
            if not self._pools[name].wait(READY_S):
                for taken in pools:
                    self._give_back(taken)
                raise UserError(
                    f"the Ray cluster did not give {', '.join(map(str, bundles))} within {READY_S:.0f} s:"
                    " something else has taken the room; wait, add a node, or take less in [deployment.ray]"
                )
        send(self._line, {"reserved": [_shown(room) for room in rooms]})

    def _take(self, pool: str, bundles: Sequence[NodeBundle], places: Mapping[str, NodeRoom]) -> None:
        selectors = [{NODE_ID: places[bundle.process].id} for bundle in bundles]
        resources = [bundle.resources() for bundle in bundles]
        self._pools[pool] = placement_group(resources, strategy="PACK", bundle_label_selector=selectors)

    def _give_back(self, pool: str) -> None:
        if (taken := self._pools.pop(pool, None)) is not None:
            remove_placement_group(taken)

    def _has_pool(self, group: PlacedGroup) -> bool:
        """Whether the nodes of the group's pool are all there. A pool that has lost one is taken anew elsewhere.

        Ray would look for another place by itself, but without a pause: 30,000 times a second where there is no room.
        """
        if group.pool in self._pools:
            state = placement_group_table(self._pools[group.pool])["state"]
            if state == "CREATED":
                return True
            if state == "PENDING" and time.monotonic() < group.taken_at + READY_S:
                return False
            self._give_back(group.pool)
        bundles = self._bundles[group.pool]
        try:
            self._take(group.pool, bundles, place(bundles, self._rooms()))
        except UserError:
            return False
        group.taken_at = time.monotonic()
        return False

    # Processes

    def _start(self, word: Mapping[str, Any]) -> None:
        members = [PlacedMember(one["name"], NodeBundle(**one["bundle"])) for one in word["members"]]
        self._groups[word["spec"]["name"]] = PlacedGroup(
            word["spec"], word["output"], word["run_dir"], word["life"], word["pool"], members
        )

    def _seek(self, group: PlacedGroup) -> None:
        """Give the group its actors, once its nodes are there; take them away again when one of those goes."""
        has_pool = self._has_pool(group)
        for index, member in enumerate(group.members):
            if has_pool and member.actor is None:
                options: dict[str, Any] = {
                    "num_cpus": member.bundle.num_cpus,
                    "num_gpus": member.bundle.num_gpus,
                    "max_restarts": 0,
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(self._pools[group.pool], index),
                }
                member.actor = _Placed.options(**options).remote()
                member.asked = member.actor.where.remote(group.run_dir)
            elif not has_pool and member.actor is not None:
                ray.kill(member.actor)
                member.actor = member.asked = member.where = None

    def _attend(self, group: PlacedGroup) -> None:
        now = time.monotonic()
        if group.is_over or now < group.next_look:
            return
        group.next_look = now + LOOK_S
        if now > group.lost_at:
            self._group_ended(group, LOST, "its node does not answer")
            return
        try:
            if group.told == "" and now >= group.next_seek:
                group.next_seek = now + SEEK_S
                self._seek(group)
            self._ask(group)
        except RayError as error:
            if group.told == "":  # a node that was about to run it is gone
                group.forget()
            elif isinstance(error, RayActorError):
                self._group_ended(group, LOST, "its node, or Ray's process on it, is gone")
            else:
                self._group_ended(group, 1, str(error).splitlines()[-1])

    def _ask(self, group: PlacedGroup) -> None:
        for member in group.members:
            if member.asked is None or not ray.wait([member.asked], timeout=0)[0]:
                continue
            found = ray.get(member.asked)
            member.asked = None
            if member.where is None:
                member.where = found
            elif not member.is_started:
                member.pid, member.is_started = found, True
            else:
                self._hear(group, member, found)
                if group.is_over:
                    return
        places = [member.where for member in group.members]
        if all(place is not None for place in places) and group.told == "":
            self._launch(group)
        if all(member.is_started for member in group.members):
            if group.told != "running":
                first = group.members[0]
                self._tell(group, "running", pid=first.pid, places=places)
            for member in group.members:
                member.asked = member.asked or member.actor.look.remote()

    def _launch(self, group: PlacedGroup) -> None:
        """Every member has a place: start them all, each told where the first one is."""
        blind = [member.where["host"] for member in group.members if member.where and not member.where["sees_run"]]
        if blind:
            line = f"{blind[0]} does not see {group.run_dir}: give the run a --dir in a folder that all nodes share"
            self._group_ended(group, UserError.exit_code, line)
            return
        group.told = "placed"
        first = group.members[0].where or {}
        for rank, member in enumerate(group.members):
            fields = {**group.fields, "name": member.name}
            if len(group.members) > 1:
                world = {
                    "WORLD_SIZE": str(len(group.members)), "RANK": str(rank), "LOCAL_RANK": "0",
                    "MASTER_ADDR": str(first["address"]), "MASTER_PORT": str(first["port"]),
                }  # fmt: skip
                fields["environment"] = {**fields["environment"], **world}
            member.asked = member.actor.start.remote(fields, group.output)

    def _hear(self, group: PlacedGroup, member: PlacedMember, found: Mapping[str, Any]) -> None:
        host = (member.where or {}).get("host", "")
        beats = [text.decode() for text in found["beats"]]
        if beats:
            send(self._line, {"beats": beats, "host": host, "name": group.name, "member": member.name})
        member.code = found["code"]
        if member.code is None:
            return
        if member.code == 0 and any(other.code is None for other in group.members):
            return  # the last rank to end says how it went
        self._group_ended(group, member.code, found["line"])

    def _group_ended(self, group: PlacedGroup, code: int, line: str) -> None:
        group.is_over = True
        # Not a wait on a node that is gone: what is asked of that fails at once.
        ending = [member.actor.end.remote() for member in group.members if member.where is not None]
        if ending:
            ray.wait(ending, num_returns=len(ending), timeout=END_S)
        for member in group.members:
            if member.actor is not None:
                with contextlib.suppress(RayError):
                    ray.kill(member.actor)
        self._tell(group, "ended", code=code, line=line)

    def _tell(self, group: PlacedGroup, state: str, **more: Any) -> None:
        group.told = state
        send(self._line, {"name": group.name, "life": group.life, "state": state, **more})


_Placed = ray.remote(PlacedCommand)


def _shown(room: NodeRoom) -> dict[str, Any]:
    return dataclasses.asdict(room)


def main(arguments: Sequence[str]) -> int:
    """Serve the supervisor at the other end of the socket with the given number."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's, which says what ends when
    line = socket.socket(fileno=int(arguments[0]))
    agent = RayAgent(line)
    try:
        agent.run()
    except (BrokenPipeError, ConnectionError):
        return 0
    return 0


if __name__ == "__main__":
    # Ray finds classes by the name of their module, and this one would be called __main__ on the nodes.
    from mettle.runs.cluster import agent

    code = agent.main(sys.argv[1:])
    os._exit(code)  # Ray's own farewell takes seconds, and nobody waits for it
