"""What isolation is really in force: measured from inside a cell, graded, shown, and stored with every result.

A layer counts only if code running in a cell found the door shut; what the setup believes is not evidence. `examine`
turns the findings of `explorer.py` (the code that tries the doors) into a report. Nothing here falls back: a pool whose
host gives less than the config requires does not start.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from typing import Any, Final

from mettle.errors import UserError
from mettle.sandbox.config import Backend, Grade, SandboxConfig

_ORDER: Final[tuple[Grade, ...]] = ("none", "ns-noseccomp", "ns")
_NAMESPACES: Final = {"user": "user", "mount": "mnt", "pid": "pid", "network": "net", "ipc": "ipc", "uts": "uts"}
_CONTAINER_FIX: Final = (
    "in a container, run with a seccomp profile that allows clone, unshare, mount, umount2, pivot_root and setns; "
    "on Ubuntu 23.10 or later, load an AppArmor profile with `userns,` for this interpreter "
    "or set sysctl kernel.apparmor_restrict_unprivileged_userns=0"
)
_CGROUP: Final = "memory cgroup"
_NO_CGROUP: Final = "none; process 1 watches the memory of all its processes instead"
_SYSCTL_FIX: Final = "raise sysctl user.max_user_namespaces"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: whether it is in force, what was seen, and, if it is not, what would help."""

    name: str
    is_in_force: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class IsolationReport:
    """The layers found in force on this host by this backend, and their grade."""

    backend: Backend
    grade: Grade
    layers: tuple[Layer, ...]
    kernel: str
    machine: str
    user: str

    def lines(self) -> list[str]:
        """The report as text, one layer a line."""
        head = f"backend {self.backend}, grade {self.grade}, started by {self.user}, Linux {self.kernel} {self.machine}"
        lines = [head]
        for layer in self.layers:
            lines.append(f"  {'yes' if layer.is_in_force else 'NO ':3}  {layer.name}: {layer.detail}")
            if layer.fix:
                lines.append(f"       to have it: {layer.fix}")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "backend": self.backend,
            "grade": self.grade,
            "kernel": self.kernel,
            "machine": self.machine,
            "user": self.user,
            "layers": [
                {"name": layer.name, "in_force": layer.is_in_force, "detail": layer.detail, "fix": layer.fix}
                for layer in self.layers
            ],
        }

    def is_at_least(self, grade: Grade) -> bool:
        return _ORDER.index(self.grade) >= _ORDER.index(grade)


def check(report: IsolationReport, config: SandboxConfig) -> None:
    """Refuse a host that gives less than the config requires, naming what is missing and what would help."""
    if config.backend == "unsafe" or report.is_at_least(config.require):
        return
    missing = [layer for layer in report.layers if not layer.is_in_force and layer.fix]
    reasons = "; ".join(f"{layer.name}: {layer.detail}" for layer in missing)
    fixes = "; ".join(dict.fromkeys(layer.fix for layer in missing))
    raise UserError(
        f"the sandbox must have isolation {config.require!r} and this host gives {report.grade!r} ({reasons}). "
        f"To have it: {fixes}. To run code with no isolation, set sandbox.backend to 'unsafe'"
    )


def refused(config: SandboxConfig, layers: dict[str, str]) -> IsolationReport:
    """The report of a host where no cell could be made; `layers` says why, by stage."""
    reasons = [(stage, why) for stage, why in layers.items() if why and stage != "seccomp"]
    found = [Layer(f"{stage} namespace" if stage == "user" else stage, False, why, _fix(why)) for stage, why in reasons]
    seccomp = layers.get("seccomp", "not tried")
    found.append(Layer("seccomp", False, seccomp or "the kernel takes the filter", _seccomp_fix(seccomp)))
    return _report(config, "none", found)


def unisolated(config: SandboxConfig) -> IsolationReport:
    """The report of the backend that isolates nothing."""
    detail = "code runs as this user, sees this machine's files, processes and network"
    return _report(config, "none", [Layer("everything", False, detail, "set sandbox.backend to 'zygote'")])


def examine(config: SandboxConfig, findings: dict[str, Any], layers: dict[str, str]) -> IsolationReport:
    """Grade what code inside a cell found when it tried the doors."""
    found = [_namespace_layer(name, kind, findings, layers) for name, kind in _NAMESPACES.items()]
    found += [_root_layer(findings), _proc_layer(findings), _privilege_layer(findings), _limits_layer(findings)]
    is_contained = all(layer.is_in_force for layer in found)
    seccomp = _seccomp_layer(findings, layers.get("seccomp", ""))
    found.append(seccomp)
    found.append(Layer(_CGROUP, False, _NO_CGROUP))
    grade: Grade = "none" if not is_contained else "ns" if seccomp.is_in_force else "ns-noseccomp"
    return _report(config, grade, found)


def with_memory_cgroup(report: IsolationReport) -> IsolationReport:
    """The report of a pool whose machines were seen to be in cgroups of their own."""
    return _with_layer(report, Layer(_CGROUP, True, "the kernel limits memory, files in memory, and processes"))


def without_memory_cgroup(report: IsolationReport) -> IsolationReport:
    """The report of a pool whose machines turned out not to be in one."""
    return _with_layer(report, Layer(_CGROUP, False, _NO_CGROUP))


def _with_layer(report: IsolationReport, layer: Layer) -> IsolationReport:
    return replace(report, layers=tuple(layer if old.name == layer.name else old for old in report.layers))


def _report(config: SandboxConfig, grade: Grade, layers: list[Layer]) -> IsolationReport:
    user = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
    return IsolationReport(config.backend, grade, tuple(layers), platform.release(), platform.machine(), user)


def _fix(why: str) -> str:
    return _SYSCTL_FIX if "ENOSPC" in why or "EUSERS" in why else _CONTAINER_FIX


def _seccomp_fix(why: str) -> str:
    if not why:
        return ""
    return "use an x86_64 host with seccomp, or set sandbox.require to 'ns-noseccomp' after weighing it"


def _namespace_layer(name: str, kind: str, findings: dict[str, Any], layers: dict[str, str]) -> Layer:
    inside = findings["namespaces"].get(kind)
    if inside is None:
        # Without /proc the code cannot name its namespaces: their effects count, and else the word of the setup.
        is_private = findings["effects"].get(name, layers.get("namespaces") == "")
        detail = "seen by its effect" if name in findings["effects"] else "set up, and not visible without /proc"
    else:
        is_private = inside != os.readlink(f"/proc/self/ns/{kind}")
        detail = f"code is in {inside}"
    return Layer(f"{name} namespace", is_private, detail, "" if is_private else _CONTAINER_FIX)


def _root_layer(findings: dict[str, Any]) -> Layer:
    writable = findings["writable"]
    names = " ".join(findings["root"])
    own = "its own tmpfs is" if findings["is_machine"] else "nothing outside /tmp, /work, /dev/shm is"
    detail = f"writable: {' '.join(writable)}" if writable else f"{own} writable; / has {names}"
    return Layer("read-only root", not writable, detail, _CONTAINER_FIX if writable else "")


def _proc_layer(findings: dict[str, Any]) -> Layer:
    seen = findings["processes"]
    is_private = len(seen) <= (3 if findings["is_machine"] else 2)  # process 1, in a machine a hand, and the code
    detail = f"code sees processes {seen}" if seen else "there is no /proc inside; tests cannot start processes"
    return Layer("private /proc", is_private, detail, "" if is_private else _CONTAINER_FIX)


def _privilege_layer(findings: dict[str, Any]) -> Layer:
    held = findings["privileges"]
    return Layer(
        "no privileges", not held, f"code could: {', '.join(held)}" if held else "no mount, no chown, no uid 0"
    )


def _limits_layer(findings: dict[str, Any]) -> Layer:
    unlimited = findings["unlimited"]
    detail = f"unlimited: {', '.join(unlimited)}" if unlimited else "cpu, memory, processes, files, core dumps"
    return Layer("resource limits", not unlimited, detail)


def _seccomp_layer(findings: dict[str, Any], why_not: str) -> Layer:
    answered = findings["calls"]
    is_in_force = not why_not and not answered
    detail = why_not or (f"the kernel answered {', '.join(answered)}" if answered else "an allow-list of system calls")
    return Layer("seccomp", is_in_force, detail, "" if is_in_force else _seccomp_fix(detail))
