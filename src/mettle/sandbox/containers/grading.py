"""What isolation a container gives, graded from what programs inside found, in the words of `sandbox/isolation.py`.

    none           something that must hold does not
    ns-noseccomp   processes, network, root, privileges and limits hold; the kernel takes every system call
    ns             and what a container must not call is refused
    kernel         and the system calls reach a kernel of the container's own (gVisor)

Invariant: a layer is in force only if code inside found the door shut. What the service was asked for is no evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from mettle.sandbox.config import Grade, SandboxConfig
from mettle.sandbox.isolation import IsolationReport, Layer

# What the filters that container engines ship leave open, and harmless without privileges.
_TOLERATED: Final = frozenset(
    {"memfd_create", "shmget", "ptrace", "socket(AF_NETLINK)", "process_vm_readv", "personality"}
)
_ALL_USERS: Final = ["0", "0", "4294967295"]
_V1_UNLIMITED_BYTES: Final = 1 << 60
_FILTERED: Final = "2"
_MOST_PROCESSES: Final = 4096  # a limit of a user above that is the host's own, for all containers together
_CAPABILITIES: Final = ("CapEff", "CapPrm", "CapBnd", "CapAmb")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where the containers are. `targets` must not be reached from inside; `fixes` says what helps, by layer."""

    user: str
    targets: tuple[tuple[str, int], ...] = ()
    has_network: bool = False
    fixes: tuple[tuple[str, str], ...] = ()

    def fix(self, layer: str) -> str:
        return dict(self.fixes).get(layer, "")


def unmeasured(config: SandboxConfig) -> IsolationReport:
    """The report of the machine in which it is measured."""
    return IsolationReport(config.backend, "none", (), "", "", "")


def examine(
    config: SandboxConfig, doors: dict[str, Any], place: dict[str, Any], around: Surroundings
) -> IsolationReport:
    """Grade what the two programs inside have found."""
    must_hold = [
        _processes(doors),
        _network(place, around),
        _root(doors),
        _privileges(doors, place),
        _limits(doors, place),
    ]
    seccomp, kernel = _seccomp(doors, place), _kernel(place)
    found = [_with_fix(layer, around) for layer in (*must_hold, seccomp, kernel, _users(place), *_cgroups(place))]
    grade: Grade = "none"
    if all(layer.is_in_force for layer in must_hold):
        grade = "kernel" if kernel.is_in_force else "ns" if seccomp.is_in_force else "ns-noseccomp"
    return IsolationReport(config.backend, grade, tuple(found), place["kernel"], place["machine"], around.user)


def _with_fix(layer: Layer, around: Surroundings) -> Layer:
    if layer.is_in_force or layer.fix:
        return layer
    return Layer(layer.name, False, layer.detail, around.fix(layer.name))


def _processes(doors: dict[str, Any]) -> Layer:
    seen = doors["processes"]  # process 1, a worker, and the program that looks
    return Layer("pid namespace", 1 in seen and len(seen) <= 3, f"code sees processes {seen}")


def _network(place: dict[str, Any], around: Surroundings) -> Layer:
    interfaces, reached = place["interfaces"], place["reached"]
    if reached:
        return Layer("network", around.has_network, f"code reaches {', '.join(reached)}")
    others = [name for name in interfaces if name != "lo"]
    if not others:
        return Layer("network", True, "no interface but its own loopback")
    tried = ", ".join(f"{host}:{port}" for host, port in around.targets)
    is_shut = bool(around.targets) or around.has_network
    detail = f"interfaces {', '.join(others)}; " + (f"nothing answers at {tried}" if tried else "nothing was tried")
    return Layer("network", is_shut, detail)


def _root(doors: dict[str, Any]) -> Layer:
    writable = doors["writable"]
    detail = f"writable: {' '.join(writable)}" if writable else "the image cannot be changed; only tmpfs is writable"
    return Layer("read-only root", not writable, detail)


def _privileges(doors: dict[str, Any], place: dict[str, Any]) -> Layer:
    status, held = place["status"], list(doors["privileges"])
    if status["Uid"].split()[1] == "0":
        held.append("it is uid 0")
    held += [f"{name} {status[name]}" for name in _CAPABILITIES if int(status.get(name, "0"), 16)]
    if status.get("NoNewPrivs", "0") != "1":
        held.append("a program may gain privileges")
    return Layer("no privileges", not held, "; ".join(held) if held else "no capability, no uid 0, none to be gained")


def _limits(doors: dict[str, Any], place: dict[str, Any]) -> Layer:
    unlimited = list(doors["unlimited"])
    unlimited = [name for name in unlimited if name != "NPROC"]
    if not _is_limited(place, "pids") and not 0 < place["processes"] <= _MOST_PROCESSES:
        unlimited.append("NPROC")
    detail = f"unlimited: {', '.join(unlimited)}" if unlimited else "cpu, memory, processes, files, core dumps"
    return Layer("resource limits", not unlimited, detail)


def _seccomp(doors: dict[str, Any], place: dict[str, Any]) -> Layer:
    mode = place["status"].get("Seccomp", "0")
    answered = [name for name in doors["calls"] if name not in _TOLERATED] if place["machine"] == "x86_64" else []
    if mode != _FILTERED:
        return Layer("seccomp", False, "no filter is in force")
    detail = f"the kernel answered {', '.join(answered)}" if answered else "the engine's filter is in force"
    return Layer("seccomp", not answered, detail)


def _kernel(place: dict[str, Any]) -> Layer:
    is_own = bool(place["is_gvisor"])
    return Layer("own kernel", is_own, "gVisor answers system calls" if is_own else "the host's kernel is shared")


def _users(place: dict[str, Any]) -> Layer:
    is_own = place["user_map"] != _ALL_USERS
    return Layer("own users", is_own, "its users are nobody else's" if is_own else "its users are the host's")


def _cgroups(place: dict[str, Any]) -> list[Layer]:
    return [
        Layer(f"cgroup {name}", is_limited, f"the limit is {value}" if is_limited else "no limit can be seen")
        for name, value in place["cgroup"].items()
        for is_limited in [_is_limited(place, name)]
    ]


def _is_limited(place: dict[str, Any], name: str) -> bool:
    value = place["cgroup"][name]
    return value.isdigit() and 0 < int(value) < _V1_UNLIMITED_BYTES
