"""Who made a container, in words that another process can check, and what of the dead may be removed.

An owner is a process of a host since its last start. Its containers say who it is and until when they are wanted.
Invariant: what belongs to an owner that may still live is not touched before its time.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

MARK: Final = "mettle.sandbox"
OWNER: Final = "mettle.owner"
PROCESS: Final = "mettle.owner-process"
EXPIRES: Final = "mettle.expires"
IMAGE: Final = "mettle.image"
_DAY_S: Final = 86_400
_MARGIN_S: Final = 600
_ENDED: Final = ("created", "exited", "dead")


class Owner(NamedTuple):
    """This process, as its containers name it."""

    id: str
    process: str

    @classmethod
    def of_this_process(cls) -> Owner:
        return cls(secrets.token_hex(8), f"{_host()}/{os.getpid()}/{_started(os.getpid())}")

    def labels(self, lifetime_s: float | None) -> dict[str, str]:
        expires = int(time.time() + (lifetime_s or _DAY_S) + _MARGIN_S)
        return {MARK: "1", OWNER: self.id, PROCESS: self.process, EXPIRES: str(expires)}


def is_leftover(labels: Mapping[str, str], state: str, age_s: float) -> bool:
    """Whether a container of ours, in a state that Docker names, belongs to nobody any more."""
    host, pid, started = ["", "", "", *labels.get(PROCESS, "").rsplit("/", 2)][-3:]
    if host == _host() and pid.isdigit():
        return _started(int(pid)) != started
    expires = labels.get(EXPIRES, "")
    if expires.isdigit() and time.time() > int(expires):
        return True
    return state in _ENDED and age_s > _MARGIN_S


def _host() -> str:
    """This host since its last start: a container's own process numbers would say nothing outside it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot, space = "", ""
    return f"{socket.gethostname()}/{boot}/{space}"


def _started(pid: int) -> str:
    """When a process was started, in the kernel's ticks; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    return stat.rpartition(b")")[2].split()[19].decode()
