"""A cluster in simulated time: nodes with room, that can be lost with all that runs on them and come back.

Parts: `SimulatedNode`, `SimulatedCluster` (the agent's side of a `RayLauncher`'s line). Where a process goes is decided
by `placement.place`, as in a cluster; what is asked and answered are the same words. Invariant: a node has the
processes of at most as many bundles as it has room for.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from mettle.errors import UserError
from mettle.processes.beats import Beat, encode_beat
from mettle.runs.cluster.placement import NodeBundle, NodeRoom, Placement, place
from mettle.runs.config import RayConfig
from mettle.runs.simulation.host import BEAT_S, Life, Program, SimulatedHost, until

SEEK_S: Final = 1.0
LOST_S: Final = 2.0
"""A node that is gone is missed after this."""


@dataclass(slots=True)
class SimulatedNode:
    """A node, as it is when nothing runs on it."""

    name: str
    num_cpus: float
    is_owner: bool = False
    is_there: bool = True


@dataclass(slots=True)
class _Group:
    """A process of one or several members; they start and end together."""

    word: Mapping[str, Any]
    members: list[Life] = field(default_factory=list)
    is_over: bool = False


class SimulatedCluster:
    """Nodes, and the processes that a run has on them. `start` begins to place what is asked for."""

    lost: str | None = None

    def __init__(
        self,
        config: RayConfig,
        nodes: Sequence[SimulatedNode],
        placement: Placement,
        host: SimulatedHost,
        programs: Mapping[str, Program],
    ) -> None:
        self.config = config
        self.owner_address = "simulated"
        self.on_word: Callable[[Mapping[str, Any]], None] = lambda word: None
        self.nodes = nodes
        self._host = host
        self._programs = programs
        self._bundles = placement.pools
        self._pools: dict[str, dict[str, str]] = {}
        self._groups: list[_Group] = []
        self._beats: dict[int, Beat] = {}
        # All or nothing, as a run that starts asks for it.
        places = place(placement.bundles, self._rooms())
        for name, bundles in placement.pools.items():
            self._pools[name] = {bundle.process: places[bundle.process].name for bundle in bundles}

    def tell(self, word: Mapping[str, Any]) -> None:
        """From the launcher."""
        if word["do"] == "start":
            group = _Group(word)
            self._groups.append(group)
            task = self._host.loop.create_task(self._begin(group))
            task.add_done_callback(lambda done: done.cancelled() or done.result())
        elif word["do"] == "signal":
            for group in self._groups:
                if group.word["spec"]["name"] == word["name"] and group.word["life"] == word["life"]:
                    self._signal(group, signal.Signals(word["number"]))

    def node(self, name: str) -> SimulatedNode:
        """One of the nodes."""
        return next(node for node in self.nodes if node.name == name)

    def lose(self, name: str) -> None:
        """A node goes, with all that runs there."""
        self.node(name).is_there = False
        for life in self._host.lives.values():
            life.is_cut_off |= life.node == name
        for group in self._groups:
            if any(life.node == name and life.is_alive for life in group.members):
                for life in group.members:
                    life.end(-signal.SIGKILL)

    async def beat_for_ever(self) -> None:
        """Bring the beats of the nodes to the supervisor, in ages, as their clocks may differ."""
        while True:
            await asyncio.sleep(BEAT_S)
            now = self._host.now()
            for group in self._groups:
                for life in [life for life in group.members if life.is_alive]:
                    within = [one for one in self._host.lives.values() if one.is_alive and one.within is life]
                    beats = [beat for one in (life, *within) if (beat := self._newest_beat(one)) is not None]
                    texts = [encode_beat(beat.shifted(-now)).decode() for beat in beats]
                    if texts:
                        name = group.word["spec"]["name"]
                        self.on_word({"name": name, "member": life.name, "host": life.node, "beats": texts})

    def _newest_beat(self, life: Life) -> Beat | None:
        """One that is stopped has left its last one."""
        if (beat := life.beat()) is not None:
            self._beats[life.pid] = beat
        return self._beats.get(life.pid)

    def _rooms(self) -> list[NodeRoom]:
        used: dict[str, float] = {}
        for name, places in self._pools.items():
            for bundle in self._bundles[name]:
                node = places[bundle.process]
                used[node] = used.get(node, 0.0) + bundle.num_cpus
        return [
            NodeRoom(node.name, node.num_cpus - used.get(node.name, 0.0), 0.0, node.is_owner)
            for node in self.nodes
            if node.is_there
        ]

    def _has_pool(self, pool: str) -> bool:
        """Whether the nodes of a pool are all there; one that has lost a node is taken anew elsewhere."""
        places = self._pools.get(pool)
        if places is not None and all(self.node(name).is_there for name in places.values()):
            return True
        self._pools.pop(pool, None)
        bundles: Sequence[NodeBundle] = self._bundles[pool]
        try:
            found = place(bundles, self._rooms())
        except UserError:
            return False
        self._pools[pool] = {process: node.name for process, node in found.items()}
        return True

    async def _begin(self, group: _Group) -> None:
        word = group.word
        await until(lambda: group.is_over or self._has_pool(word["pool"]), SEEK_S)
        if group.is_over:
            return
        program = self._programs[word["spec"]["module"]]
        nodes = self._pools[word["pool"]]
        for one in word["members"]:
            environment = word["spec"]["environment"]
            node = nodes[one["bundle"]["process"]]
            life = Life(self._host, one["name"], program, node=node, environment=environment)
            life.on_end.append(lambda: self._host.loop.create_task(self._member_ended(group)))
            group.members.append(life)
        self._say(group, "running", pid=group.members[0].pid, places=[{"host": life.node} for life in group.members])

    async def _member_ended(self, group: _Group) -> None:
        codes = [life.code for life in group.members if life.code is not None]
        if group.is_over or (codes[-1] == 0 and len(codes) < len(group.members)):
            return
        group.is_over = True
        is_node_gone = any(not self.node(life.node).is_there for life in group.members)
        line = next((life.said for life in group.members if life.said), "")
        for life in group.members:
            life.end(-signal.SIGKILL)
        if is_node_gone:
            await asyncio.sleep(LOST_S)
            line = "its node, or Ray's process on it, is gone"
        self._say(group, "ended", code=codes[-1], line=line)

    def _signal(self, group: _Group, number: signal.Signals) -> None:
        if group.is_over:
            return
        if not group.members:
            group.is_over = True
            self._say(group, "ended", code=-number, line="it waited for a place")
        for life in group.members:
            if number == signal.SIGKILL or not life.is_frozen:
                life.end(-number)
        if group.members and not any(life.is_alive for life in group.members) and not group.is_over:
            group.is_over = True  # whoever asked waits for the word without letting time pass
            self._say(group, "ended", code=-number, line="")

    def _say(self, group: _Group, state: str, **more: Any) -> None:
        name, life = group.word["spec"]["name"], group.word["life"]
        self.on_word({"name": name, "life": life, "state": state, **more})
