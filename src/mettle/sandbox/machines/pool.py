"""The pool of machines: makes them, measures what isolates them, ends them when their time is over.

Invariant: a machine ends with its pool, and the pool's processes end with the process that owns it, however that ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from mettle.errors import SandboxError, UserError
from mettle.sandbox import isolation
from mettle.sandbox.cgroups import Absence, CgroupHome, MachineCgroup, find_home, why_incomplete
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.keeper import TemplateKeeper, why_not_ready
from mettle.sandbox.machines.channel import Channel
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.machines.files import Snapshot, deleted_on_failure, fill
from mettle.sandbox.machines.machine import LocalMachine
from mettle.sandbox.machines.registry import MachineRegistry
from mettle.sandbox.own_limits import limits_hint
from mettle.sandbox.packages import package_paths
from mettle.sandbox.pools import MeasuredPool
from mettle.sandbox.zygote.rootfs import PACKAGES
from mettle.sandbox.zygote.settings import MachineLimits

logger = logging.getLogger(__name__)

_TIDY_S: Final = 0.25
_READY_S: Final = 30.0
_EXPLORER: Final = Path(__file__).parent.with_name("explorer.py")


class MachinePool(MeasuredPool):
    """Makes machines. Use as `async with MachinePool(config) as machines`."""

    def __init__(self, config: SandboxConfig | None = None) -> None:
        super().__init__(config)
        self._keeper = TemplateKeeper(self.config, lambda: None)
        self._cgroups: CgroupHome | None = None
        self._registry: MachineRegistry[LocalMachine] = MachineRegistry()
        self._tidier: asyncio.TimerHandle | None = None

    @property
    def template_pid(self) -> int | None:
        """The process whose end ends every machine."""
        return self._keeper.template.pid if self._keeper.template else None

    @property
    def machines(self) -> tuple[LocalMachine, ...]:
        """Those that have not been deleted."""
        return self._registry.all()

    def get(self, machine_id: str) -> LocalMachine:
        """A machine by its id; SandboxError when there is none."""
        return self._registry.get(machine_id)

    async def measure(self) -> IsolationReport:
        unmeasured = isolation.unisolated(self.config)
        template = await self._keeper.living()
        if self.config.backend == "unsafe":
            return unmeasured
        if not template.is_ready:
            return isolation.refused(self.config, template.layers)
        found = await asyncio.to_thread(find_home)
        self._cgroups = found if isinstance(found, CgroupHome) else None
        try:
            machine = await self._make("measure", MachineConfig(), unmeasured)
        except SandboxError as error:
            return isolation.refused(self.config, {**template.layers, "machine": str(error)})
        try:
            source = await asyncio.to_thread(_EXPLORER.read_bytes)
            result = await machine.exec(["python3", "-S", "-", "machine"], stdin=source)
        finally:
            await machine.delete()
        if result.exit_code != 0:
            raise SandboxError(
                f"the look at a machine's isolation failed: {result.stderr[-500:].strip()}{limits_hint()}"
            )
        report = isolation.examine(self.config, json.loads(result.stdout), template.layers, template.host_ids)
        if self._cgroups is not None:
            given = {*self._cgroups.controllers, "kill"}
            missing = why_incomplete(self._cgroups)
            return isolation.with_cgroups(report, given, missing.why, missing.fix)
        absence = found if isinstance(found, Absence) else Absence("a machine could not enter a cgroup of its own", "")
        return isolation.with_cgroups(report, (), absence.why, absence.fix)

    async def create(self, config: MachineConfig | None = None, *, snapshot: Snapshot | None = None) -> LocalMachine:
        """A new machine, with its first files in place. Raises: SandboxError if it cannot be made."""
        config, report = config or MachineConfig(), self.isolation
        if config.image is not None and not any(fnmatchcase(config.image, one) for one in self.config.host_images):
            raise UserError(
                f"the backend {self.config.backend!r} has no images, and a machine of {config.image!r} was asked for: "
                "set sandbox.backend to 'docker' or 'kubernetes', or, where this host has what the image would bring, "
                "add it to sandbox.host_images"
            )
        if config.network is not None and not report.layer("network-namespace").is_in_force:
            raise UserError(
                "a machine's network is an allow-list, and this pool cannot hold it to that: its machines share the "
                "network of this host. Leave `network` out, or use an isolated backend"
            )
        machine = await self._make(f"m-{secrets.token_hex(6)}", config, report)
        async with deleted_on_failure(machine):
            await machine.open_egress()
            await fill(machine, config.files, snapshot)
        self._registry.add(machine)
        return machine

    async def close(self) -> None:
        """Delete every machine and end the template. Safe to call twice."""
        await self._registry.close()
        await self._keeper.close()
        await self._close_cgroups()
        self._isolation = None

    async def _make(self, machine_id: str, config: MachineConfig, report: IsolationReport) -> LocalMachine:
        template = await self._keeper.living()
        if not template.is_ready:
            raise SandboxError(f"no machine can be made: {why_not_ready(template)}")
        limits = self._with_packages(config.limits())
        self._check_cpus(config)
        cgroup = self._make_cgroup(machine_id, limits)
        is_counted = cgroup is not None and self._cgroups is not None and "memory" in self._cgroups.controllers
        limits = limits._replace(is_memory_counted=is_counted)
        try:
            clone = await template.spawn_machine(limits, cgroup.procs if cgroup else None)
        except BaseException:
            if cgroup is not None and self._cgroups is not None:
                self._cgroups.let_go(cgroup)
            raise
        channel = Channel(clone.channel)
        machine = LocalMachine(
            machine_id, config, report, channel, lambda: self._keeper.kill(clone.number, template.generation)
        )
        machine.cgroup = cgroup
        machine.on_end = self._forget
        try:
            async with asyncio.timeout(_READY_S):
                header = await channel.ready
        except BaseException:
            await machine.force_end("it was not ready in time")
            raise
        if header.get("ready") is not True:
            machine.close()
            raise SandboxError(f"a machine could not be made: {str(header.get('failed'))[:500]}")
        self._check_cgroup(machine, has_cgroup=header.get("has_cgroup") is True)
        return machine

    def _make_cgroup(self, name: str, limits: MachineLimits) -> MachineCgroup | None:
        try:
            return self._cgroups.make(name, limits) if self._cgroups is not None else None
        except OSError as error:
            self._give_up_cgroups(str(error))
            return None

    def _check_cgroup(self, machine: LocalMachine, *, has_cgroup: bool) -> None:
        """A machine that should be in its cgroup and is not means that none will be."""
        if machine.cgroup is None:
            return
        machine.cgroup.close_entrance()
        if not (has_cgroup and machine.cgroup.is_occupied()):
            self._give_up_cgroups("a machine could not enter its own")

    def _check_cpus(self, config: MachineConfig) -> None:
        if config.cpus is not None and not (self._cgroups is not None and "cpu" in self._cgroups.controllers):
            raise UserError(
                f"a machine's cpus is {config.cpus:g}, and this host cannot hold it to that: it has no cgroup with the "
                "cpu controller for machines. `mettle sandbox doctor` says what would help; None is without limit"
            )

    def _give_up_cgroups(self, why: str) -> None:
        logger.warning("machines have no cgroup: %s", why)
        self._cgroups = None
        if self._isolation is not None:
            self._isolation = isolation.with_cgroups(self._isolation, (), why)

    async def _close_cgroups(self) -> None:
        if self._tidier is not None:
            self._tidier.cancel()
            self._tidier = None
        home, self._cgroups = self._cgroups, None
        if home is not None:
            await home.remove()

    def _with_packages(self, limits: MachineLimits) -> MachineLimits:
        """Where machines find the packages that the pool was given; a PYTHONPATH of the caller's comes first."""
        if not self.config.python_packages:
            return limits
        if self.config.backend == "unsafe":
            paths = [str(path.parent) for path in package_paths(self.config.python_packages).found]
        else:
            paths = [PACKAGES]
        given = limits.environment.get("PYTHONPATH")
        path = os.pathsep.join(dict.fromkeys([*([given] if given else []), *paths]))
        return limits._replace(environment={**limits.environment, "PYTHONPATH": path})

    def _forget(self, machine: LocalMachine) -> None:
        self._registry.forget(machine)
        if machine.cgroup is not None and self._cgroups is not None:
            self._cgroups.let_go(machine.cgroup)
            machine.cgroup = None
            self._tidier = self._tidier or asyncio.get_running_loop().call_later(_TIDY_S, self._tidy)

    def _tidy(self) -> None:
        """Delete the cgroups of machines whose last processes have gone in the meantime."""
        is_tidy = self._cgroups is None or self._cgroups.tidy()
        self._tidier = None if is_tidy else asyncio.get_running_loop().call_later(_TIDY_S, self._tidy)
