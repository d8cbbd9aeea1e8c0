"""What this host gives untrusted code: each layer, for tests that are judged and for machines, as code inside finds it.

Parts: `examine_host`, `HostReport`. Invariant: nothing is concluded from settings; both kinds of sandbox are started,
and code in them tries the doors.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

from mettle.errors import SandboxError, UserError
from mettle.sandbox import hosts, isolation
from mettle.sandbox.backends import open_machines
from mettle.sandbox.config import Grade, SandboxConfig
from mettle.sandbox.hosts import HostKind
from mettle.sandbox.isolation import IsolationReport, Layer
from mettle.sandbox.judge.pool import SandboxPool
from mettle.sandbox.machines.pool import MachinePool

_EMBEDDED: Final = ("zygote", "unsafe")


@dataclass(frozen=True, slots=True)
class HostReport:
    """The layers of both kinds of sandbox, and what of the config's requirement is not met by which."""

    judge: IsolationReport
    machines: IsolationReport
    unmet: tuple[str, ...]
    host: HostKind

    @property
    def grade(self) -> Grade:
        """The lesser of the two."""
        return min((self.judge.grade, self.machines.grade), key=isolation.ORDER.index)

    def lines(self) -> list[str]:
        """The report as text: for each layer, whether tests have it, whether machines have it, and what was seen."""
        head = self.judge
        lines = [
            f"started by {head.user}, Linux {head.kernel} {head.machine}, backend {head.backend}",
            f"grade: tests {head.grade}, machines {self.machines.grade}",
            *self.host.lines(),
            "",
            "  tests machines",
        ]
        fixes: dict[str, list[str]] = {}
        for layer_id in dict.fromkeys(layer.id for layer in (*head.layers, *self.machines.layers)):
            found = [_own_layer(report, layer_id) for report in (self.judge, self.machines)]
            lines.append(_layer_line(found))
            for layer in found:
                if (
                    layer is not None
                    and layer.fix not in ("", self.host.fix)
                    and layer.name not in fixes.get(layer.fix, [])
                ):
                    fixes.setdefault(layer.fix, []).append(layer.name)
        for fix, names in fixes.items():
            lines += ["", f"to have {', '.join(names)}: {fix}"]
        for text in self.unmet:
            lines += ["", f"not met: {text}"]
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data: that of tests, with that of machines in `machines`."""
        both = {**self.judge.as_dict(), "machines": self.machines.as_dict()}
        return {**both, "grade": self.grade, "unmet": list(self.unmet), "host": self.host.as_dict()}


def _layer_line(found: list[Layer | None]) -> str:
    """Whether tests have it, whether machines have it, and what was seen of the one that lacks it, if any."""
    marks = ["-" if layer is None else "yes" if layer.is_in_force else "NO" for layer in found]
    known = [layer for layer in found if layer is not None]
    shown = next((layer for layer in known if not layer.is_in_force and layer.fix), known[-1])
    return f"  {marks[0]:5} {marks[1]:8} {shown.name}: {shown.detail}"


def _own_layer(report: IsolationReport, layer_id: str) -> Layer | None:
    return next((layer for layer in report.layers if layer.id == layer_id), None)


def examine_host(config: SandboxConfig | None = None) -> HostReport:
    """Start both kinds of sandbox and look (here, about half a second). What cannot be had is in the report.

    Raises: UserError or SandboxError for a backend elsewhere that cannot be reached.
    """
    config = config or SandboxConfig()
    judge, machines = asyncio.run(_measure(config))
    unmet = []
    for what, report in (("tests", judge), ("machines", machines)):
        try:
            isolation.check(report, config)
        except UserError as error:
            unmet.append(f"{what}: {error}")
    return HostReport(judge, machines, tuple(unmet), _host(machines))


def _host(machines: IsolationReport) -> HostKind:
    """What kind of host this is, by what it refused."""
    if machines.grade == "ns" and not machines.layer("own-proc").is_in_force:
        return hosts.MASKED
    stages = ("user-namespace", "namespaces", "root", "start")
    refused = [layer for layer in machines.layers if layer.id in stages and not layer.is_in_force]
    return hosts.recognise({layer.id.removesuffix("-namespace"): layer.detail for layer in refused})


async def _measure(config: SandboxConfig) -> tuple[IsolationReport, IsolationReport]:
    if config.backend in _EMBEDDED:
        return await _measured(SandboxPool(config), config), await _measured(MachinePool(config), config)
    async with open_machines(config.model_copy(update={"require": ()})) as machines:
        return machines.isolation, machines.isolation  # tests are judged in the same containers


async def _measured(pool: SandboxPool | MachinePool, config: SandboxConfig) -> IsolationReport:
    try:
        return await pool.measure()
    except SandboxError as error:
        return isolation.refused(config, {"start": str(error)})
    finally:
        await pool.close()
