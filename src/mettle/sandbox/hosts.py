"""Hosts that give less than namespaces: what kind one is, told by what it refused, and what exactly would help there.

Parts: `HostKind`, `recognise`, the second way (`landlock-only`). A fix names the smallest permission that is enough;
taking all protection from a container is never one.
Invariant: what is denied and why comes from the attempt itself; files of the host only say which kind of host it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mettle.sandbox.zygote import landlock, seccomp

SECOND_WAY: Final = """sandbox.require = "landlock-only" in the config, or SandboxConfig(require="landlock-only")"""
_DOCKER: Final = (
    "run the container with `--security-opt seccomp=mettle.json`, Docker's default profile with clone, unshare, "
    'setns, mount, mount_setattr, umount2 and pivot_root allowed (docs/how-to/use-sandboxes.md, "Inside a container"; '
    "with AppArmor on the host also `--security-opt apparmor=unconfined`)"
)
_KUBERNETES: Final = (
    "in the pod's spec `hostUsers: false`, and in the container's securityContext "
    "`seccompProfile: {type: Localhost, localhostProfile: mettle.json}` and `procMount: Unmasked`"
)
_APPARMOR: Final = (
    "on the host, load an AppArmor profile for this interpreter with the line `userns,`, or set sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0"
)
_SYSCTL: Final = "on the host, set sysctl user.max_user_namespaces=15000 (it is 0, or used up)"
_MASKED: Final = (
    "in Docker `--security-opt systempaths=unconfined`; in Kubernetes `procMount: Unmasked` with `hostUsers: false`"
)
_DEBIAN: Final = "on the host, set sysctl kernel.unprivileged_userns_clone=1"


@dataclass(frozen=True, slots=True)
class HostKind:
    """One kind of host: its name, what it denied (with the error of the attempt), and what would help."""

    kind: str
    denied: tuple[str, ...] = ()
    fix: str = ""
    why_no_second_way: str | None = None

    def lines(self) -> list[str]:
        """For a person to read; nothing where nothing is denied."""
        if not self.denied:
            return []
        lines = ["", f"this host: {self.kind}"]
        lines += [f"  denied: {what}" for what in self.denied]
        lines += [f"  first way: {self.fix}"]
        if self.kind == MASKED.kind:
            return lines
        if self.why_no_second_way:
            return [*lines, f"  no second way: {self.why_no_second_way}"]
        return [*lines, f"  second way, less, for Python that is judged: {SECOND_WAY}"]

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        second = None if self.why_no_second_way or not self.denied or self.kind == MASKED.kind else SECOND_WAY
        return {"kind": self.kind, "denied": list(self.denied), "fix": self.fix, "second_way": second}


MASKED: Final = HostKind("a container that masks parts of /proc", ("mount proc: a fresh /proc [EPERM]",), _MASKED)


def recognise(refusals: Mapping[str, str]) -> HostKind:
    """The kind of host that refused these stages of the set-up, each for its reason."""
    if not refusals:
        return HostKind("nothing is denied")
    denied = tuple(f"{stage}: {why}" for stage, why in refusals.items())
    kind, fix = _kind(" ".join(refusals.values()))
    return HostKind(kind, denied, fix, why_no_landlock_only())


def _kind(why: str) -> tuple[str, str]:
    if "cannot read this interpreter" in why:
        return "an interpreter that ordinary users cannot read", "use one below /usr, or start as an ordinary user"
    if "ENOSPC" in why or "EUSERS" in why:
        return "user namespaces are switched off (user.max_user_namespaces)", _SYSCTL
    if _setting("kernel/apparmor_restrict_unprivileged_userns") == "1" and not _is_container():
        return "Ubuntu's AppArmor takes the rights of user namespaces", _APPARMOR
    if _setting("kernel/unprivileged_userns_clone") == "0":
        return "user namespaces are for root alone (kernel.unprivileged_userns_clone)", _DEBIAN
    if _is_kubernetes():
        return "a Kubernetes pod whose seccomp profile denies namespaces or mounts", _KUBERNETES
    if "unshare" not in why:
        return "namespaces are made and may not be used: AppArmor, or a container's profile", f"{_APPARMOR}; {_DOCKER}"
    return "a container whose seccomp profile denies namespaces or mounts", f"{_DOCKER}; in Kubernetes {_KUBERNETES}"


def why_no_landlock_only() -> str | None:
    """Why the grade `landlock-only` cannot be had here, or None if it can."""
    return landlock.why_not_alone() or seccomp.why_unsupported()


def _setting(name: str) -> str:
    try:
        return Path(f"/proc/sys/{name}").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _is_container() -> bool:
    return any(Path(path).exists() for path in ("/.dockerenv", "/run/.containerenv")) or _is_kubernetes()


def _is_kubernetes() -> bool:
    return Path("/var/run/secrets/kubernetes.io").exists()
