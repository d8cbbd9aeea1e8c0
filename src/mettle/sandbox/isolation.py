"""What isolation is really in force: measured from inside a cell, graded, shown, and stored with every result.

A layer counts only if code running in a cell found the door shut; what the setup believes is not evidence. `examine`
turns the findings of `explorer.py` (the code that tries the doors) into a report. Nothing here falls back: a pool whose
host gives less than the config requires does not start.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Final

from mettle.errors import UserError
from mettle.sandbox import host_ids, hosts
from mettle.sandbox.config import Backend, Grade, Requirement, SandboxConfig
from mettle.sandbox.host_ids import HostIds
from mettle.sandbox.zygote import landlock

ORDER: Final[tuple[Grade, ...]] = ("none", "landlock-only", "ns-noseccomp", "ns", "kernel")
_NAMESPACES: Final = {
    **{"user": "user", "mount": "mnt", "pid": "pid", "network": "net", "ipc": "ipc", "uts": "uts"},
    "cgroup": "cgroup",
}
_CONTAINER_FIX: Final = (
    "in a container, run with a seccomp profile that allows clone, unshare, mount, umount2, pivot_root and setns; "
    "on Ubuntu 23.10 or later, load an AppArmor profile with `userns,` for this interpreter "
    "or set sysctl kernel.apparmor_restrict_unprivileged_userns=0"
)
_LANDLOCK_FIX: Final = "Linux 5.19 or later with CONFIG_SECURITY_LANDLOCK and `landlock` in the boot option lsm="
_WITHOUT_CGROUP: Final = {
    "memory": "process 1 watches what all processes hold, and what no process maps is refused or counted",
    "pids": "the user namespace counts processes and threads",
    "cpu": "processor time is limited, the share of it is not",
    "kill": "the pid namespace ends with its process 1",
}
_NOT_FOR_TESTS: Final = "only machines get cgroups"
_WITH_CGROUP: Final = {
    "memory": "the kernel limits all memory, that of files in memory and of sockets included",
    "pids": "the kernel limits processes and threads",
    "cpu": "the kernel limits the share of the processors where a machine asks for one",
    "kill": "one write ends everything in it",
}
_METERS: Final = {
    "event": "an event of the kernel's that every child inherits counts all processes of a test, waited for or not",
    "cgroup": "cpu.stat of a cell's own cgroup counts all processes of a test, waited for or not",
}
_NO_METER: Final = "children that a test does not wait for count as far as process 1 sees them run"
_METER_FIXES: Final = {
    "event": "set sysctl kernel.perf_event_paranoid to 2 or less, and allow perf_event_open",
    "cgroup": "start it where this user may divide a cgroup: `systemd-run --user --scope -p Delegate=yes mettle ...`",
}
_NOT_CGROUPS: Final = ("cgroup-namespace",)
OPTIONAL_LAYERS: Final = (
    *("own-proc", "landlock", "own-kernel", "own-users", "own-host-user", "cpu-meter"),
    *(f"cgroup-{name}" for name in _WITHOUT_CGROUP),
)
"""What no grade asks for (but `kernel` for its own); a config that does names them."""
_PROC_FIX: Final = (
    "in Kubernetes `procMount: Unmasked` with `hostUsers: false`; in Docker `--security-opt systempaths=unconfined`"
)
_UNKNOWN_USERS: Final = HostIds(why_not="nothing was said about users")
_ALONE: Final = {
    "memory": "a test is one process, whose address space is limited",
    "pids": "a test can start no process, and process 1 counts its threads",
    "cpu": "processor time is limited, the share of it is not",
    "kill": "a test is one process, which process 1 ends",
}
_ALONE_LIMITS: Final = "cpu, memory, threads, files, open files, core dumps; a test is one process"
_ALONE_CALLS: Final = "an allow-list of system calls, with no process, socket or signal to others, no chmod, no locks"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: whether it is in force, what was seen, and, if it is not, what would help."""

    name: str
    is_in_force: bool
    detail: str
    fix: str = ""

    @property
    def id(self) -> str:
        """The name that `SandboxConfig.require` takes: `private /proc` is `private-proc`."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


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
                {
                    **{"id": layer.id, "name": layer.name, "in_force": layer.is_in_force},
                    **{"detail": layer.detail, "fix": layer.fix},
                }
                for layer in self.layers
            ],
        }

    def layer(self, layer_id: str) -> Layer:
        """The layer of that id; one that this backend does not have is not in force."""
        found = next((layer for layer in self.layers if layer.id == layer_id), None)
        return found or Layer(layer_id, False, "this backend does not have it here")

    def meets(self, required: Requirement) -> bool:
        """Whether all that is required is in force."""
        return not missing(self, required)

    def is_at_least(self, grade: Grade) -> bool:
        return ORDER.index(self.grade) >= ORDER.index(grade)


def missing(report: IsolationReport, required: Requirement) -> list[Layer]:
    """The layers that keep a report from what is required; none if it is met."""
    names = (required,) if isinstance(required, str) else required
    found: dict[str, Layer] = {}
    for name in names:
        found |= {layer.id: layer for layer in _missing(report, name)}
    return list(found.values())


def check(report: IsolationReport, config: SandboxConfig) -> None:
    """Refuse a host that gives less than the config requires, naming what is missing and what would help."""
    if config.backend == "unsafe":
        return
    lacking = missing(report, config.require)
    if not lacking:
        return
    wanted = (config.require,) if isinstance(config.require, str) else config.require
    reasons = "; ".join(f"{layer.name}: {layer.detail}" for layer in lacking)
    fixes = "; ".join(dict.fromkeys(layer.fix for layer in lacking if layer.fix)) or "nothing that is known"
    raise UserError(
        f"the sandbox must have isolation {' and '.join(map(repr, wanted))} and this host gives {report.grade!r} "
        f"({reasons}). To have it: {fixes}. {_second_way(report, config)}"
        "To run code with no isolation, set sandbox.backend to 'unsafe'"
    )


def _second_way(report: IsolationReport, config: SandboxConfig) -> str:
    """What a person may decide instead, where the host can do it."""
    if report.layer("user-namespace").is_in_force:
        return ""
    if config.allows_landlock_only:
        return "'landlock-only' is for Python that is judged; machines and other languages need namespaces. "
    if hosts.why_no_landlock_only():
        return ""
    return f"Or accept less, for Python that is judged and nothing else: {hosts.SECOND_WAY}. "


def _missing(report: IsolationReport, name: str) -> list[Layer]:
    """The layers that keep the host from giving this grade, or this layer, if any."""
    if name not in ORDER:
        layer = report.layer(name)
        return [] if layer.is_in_force else [layer]
    if report.is_at_least(name):
        return []
    found = [layer for layer in report.layers if _is_to_blame(layer, name)]
    return found or [Layer(name, False, "a layer is missing that nothing was said about")]


def _is_to_blame(layer: Layer, grade: str) -> bool:
    """Whether a layer that is not in force keeps the host from a grade; what was not even tried does not."""
    is_untried = layer.id in ("seccomp", "landlock") and not layer.fix
    own = {"landlock-only": "landlock", "kernel": "own-kernel"}.get(grade)
    counts = layer.id not in OPTIONAL_LAYERS or layer.id == own
    return counts and not layer.is_in_force and not is_untried


def refused(config: SandboxConfig, layers: dict[str, str]) -> IsolationReport:
    """The report of a host where no cell could be made; `layers` says why, by stage."""
    reasons = [(stage, why) for stage, why in layers.items() if why and stage not in ("seccomp", "landlock")]
    fix = hosts.recognise(dict(reasons)).fix if reasons else ""
    found = [Layer(f"{stage} namespace" if stage == "user" else stage, False, why, fix) for stage, why in reasons]
    seccomp = layers.get("seccomp", "not tried")
    found.append(Layer("seccomp", False, seccomp or "the kernel takes the filter", _seccomp_fix(seccomp)))
    found.append(_untried_landlock(layers.get("landlock", "not tried")))
    return _report(config, "none", found)


def unisolated(config: SandboxConfig) -> IsolationReport:
    """The report of the backend that isolates nothing."""
    detail = "code runs as this user, sees this machine's files, processes and network"
    return _report(config, "none", [Layer("everything", False, detail, "set sandbox.backend to 'zygote'")])


def examine(
    config: SandboxConfig, findings: dict[str, Any], layers: dict[str, str], users: HostIds = _UNKNOWN_USERS
) -> IsolationReport:
    """Grade what code inside a cell found when it tried the doors. `users` are those that it may be on the host."""
    found = [_namespace_layer(name, kind, findings, layers) for name, kind in _NAMESPACES.items()]
    found += [_root_layer(findings), _proc_layer(findings), _privilege_layer(findings), _limits_layer(findings)]
    is_contained = all(layer.is_in_force for layer in found)
    found += [_own_proc_layer(findings), _host_user_layer(findings["host_user"], users)]
    seccomp = _seccomp_layer(findings, layers.get("seccomp", ""))
    found += [seccomp, _landlock_layer(findings, layers.get("landlock", "not tried"))]
    found.append(Layer("cpu meter", False, "a machine's processes are limited in processor time one by one"))
    grade: Grade = "none" if not is_contained else "ns" if seccomp.is_in_force else "ns-noseccomp"
    return with_cgroups(_report(config, grade, found), frozenset(), _NOT_FOR_TESTS)


def examine_alone(config: SandboxConfig, findings: dict[str, Any], refusals: dict[str, str]) -> IsolationReport:
    """Grade what one process found that Landlock, seccomp and limits hold, where there are no namespaces."""
    reasons = {stage: why for stage, why in refusals.items() if why and stage not in ("seccomp", "landlock")}
    known = hosts.recognise(reasons)
    why = "; ".join(f"{stage}: {why}" for stage, why in reasons.items())
    absent = [Layer(f"{name} namespace", False, why, known.fix if name == "user" else "") for name in _NAMESPACES]
    read, written = findings["reads"] + findings["lists"], findings["writable"] + findings["writes_outside"]
    reach = [name for name in ("forks", "sockets", "signals") if findings[name]] + findings["changes"]
    # Bounds of capabilities bound nothing for whom no program can give any.
    held = [name for name in findings["privileges"] if not (findings["has_renounced"] and name.startswith("regain"))]
    unlimited = [name for name in findings["unlimited"] if name != "NPROC"]
    unlimited += ["threads"] if findings["num_threads"] > config.max_processes else []
    calls = findings["calls"] + reach
    found = [
        Layer("read-only root", not written, f"writable: {' '.join(written)}" if written else "its own directory is"),
        Layer("private /proc", not read, f"code reads {' '.join(read)}" if read else "no file of it can be read"),
        Layer("own /proc", False, "there is no namespace that it could show"),
        Layer("own host user", False, "all run as one user of the host: there are no namespaces"),
        _privilege_layer({"privileges": held}),
        Layer("resource limits", not unlimited, f"unlimited: {' '.join(unlimited)}" if unlimited else _ALONE_LIMITS),
        Layer("seccomp", not calls, f"the kernel answered {', '.join(calls)}" if calls else _ALONE_CALLS),
        Layer("landlock", not findings["makes_whiteouts"] and not read and not written, landlock.describe()),
    ]
    is_held = all(layer.is_in_force for layer in found if layer.id not in OPTIONAL_LAYERS or layer.id == "landlock")
    found += [Layer(f"cgroup {name}", False, f"{instead} ({_NOT_FOR_TESTS})") for name, instead in _ALONE.items()]
    return _report(config, "landlock-only" if is_held else "none", [*absent, *found])


def with_cgroups(report: IsolationReport, given: Collection[str], why_not: str, fix: str = "") -> IsolationReport:
    """The report with what cgroups do there: `given` of memory, pids, cpu and kill; `why_not` of the others."""
    others = tuple(layer for layer in report.layers if not layer.id.startswith("cgroup-") or layer.id in _NOT_CGROUPS)
    found = [
        Layer(f"cgroup {name}", True, _WITH_CGROUP[name])
        if name in given
        else Layer(f"cgroup {name}", False, f"{instead} ({why_not})", fix)
        for name, instead in _WITHOUT_CGROUP.items()
    ]
    return replace(report, layers=(*others, *found))


def with_meter(
    report: IsolationReport, config: SandboxConfig, kind: str, why_no_event: str, why_no_cgroup: str
) -> IsolationReport:
    """The report with what counts a test's processor time: `kind` is a cell's word, "" where it only has estimates.

    Raises: UserError where the config names a meter that this host has not.
    """
    wanted = config.cpu_meter
    reasons = {"event": why_no_event, "cgroup": why_no_cgroup or "a cell could not enter its own"}
    if wanted in reasons and kind != wanted:
        raise UserError(
            f"sandbox.cpu_meter is {wanted!r}, and this host does not have it: {reasons[wanted]}; take 'auto', or "
            f"{_METER_FIXES[wanted]}"
        )
    others = tuple(layer for layer in report.layers if layer.id != "cpu-meter")
    if kind in _METERS:
        return replace(report, layers=(*others, Layer("cpu meter", True, _METERS[kind])))
    why = "as asked" if wanted == "estimate" else f"event: {why_no_event}; cgroup: {reasons['cgroup']}"
    layer = Layer("cpu meter", False, f"{_NO_METER} ({why})", " or ".join(_METER_FIXES.values()))
    return replace(report, layers=(*others, layer))


def _report(config: SandboxConfig, grade: Grade, layers: list[Layer]) -> IsolationReport:
    user = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
    return IsolationReport(config.backend, grade, tuple(layers), platform.release(), platform.machine(), user)


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
    seen, told = findings["processes"], findings["host_files"]
    is_private = not told and len(seen) <= (
        3 if findings["is_machine"] else 2
    )  # process 1, in a machine a worker, itself
    detail = f"code sees processes {seen}" if seen else "there is no /proc inside"
    detail += f", and reads {', '.join(told)}" if told else "" if not seen else ", and nothing of the host's kernel"
    return Layer("private /proc", is_private, detail, "" if is_private else _CONTAINER_FIX)


def _own_proc_layer(findings: dict[str, Any]) -> Layer:
    """A convenience of the code's and no protection: what a masked /proc costs."""
    if findings["processes"]:
        return Layer("own /proc", True, "programs that need /proc find it")
    lost = (
        "/dev/stdin, /dev/fd and programs that need /proc do not work inside, because this host masks parts of its own"
    )
    return Layer("own /proc", False, lost, _PROC_FIX)


def _host_user_layer(user: int | None, users: HostIds) -> Layer:
    """What the kernel counts by user of the host (pages of pipes, descriptors in sockets) is then nobody else's."""
    fix = host_ids.FIX if os.geteuid() else host_ids.FIX_FOR_ROOT
    if not users.ids:
        return Layer("own host user", False, f"all share one user of the host: {users.why_not}", fix)
    first, number = users.ids
    if user is None:
        return Layer("own host user", True, "set up, and not visible without /proc")
    is_own = first <= user < first + number
    detail = f"each is a user of its own to the host, here {user}" if is_own else f"code is user {user} of the host"
    return Layer("own host user", is_own, detail, "" if is_own else fix)


def _privilege_layer(findings: dict[str, Any]) -> Layer:
    held = findings["privileges"]
    return Layer(
        "no privileges",
        not held,
        f"code could: {', '.join(held)}" if held else "all capability sets empty; no mount, chown, uid 0",
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


def _landlock_layer(findings: dict[str, Any], why_not: str) -> Layer:
    """By its effect: making a device that needs no privilege is what nothing else refuses."""
    if why_not:
        return _untried_landlock(why_not)
    is_in_force = not findings["makes_whiteouts"]
    detail = landlock.describe() if is_in_force else "code could make a device that it refuses"
    return Layer("landlock", is_in_force, detail, "" if is_in_force else _LANDLOCK_FIX)


def _untried_landlock(why_not: str) -> Layer:
    return Layer("landlock", False, why_not or "the kernel has it", _LANDLOCK_FIX if why_not else "")
