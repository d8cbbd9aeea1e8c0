"""The users of the host that an ordinary user's pool may give to its cells and machines: /etc/subuid and /etc/subgid.

Parts: `find_subordinates`, `HostIds`. Root needs none of this: its pools take users that are nobody's
(`zygote/host_users.py`). Invariant: where there are none, it says what exactly is missing.
"""

from __future__ import annotations

import os
import pwd
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mettle.sandbox.zygote.host_users import BLOCK

_ETC: Final = Path("/etc")
_PROGRAMS: Final = ("newuidmap", "newgidmap")
FIX: Final = (
    "as an ordinary user: install newuidmap (package uidmap or shadow-utils) and give the user ranges of at least 4096 "
    "with `usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER`; or start the pool as root"
)

FIX_FOR_ROOT: Final = "sandbox.first_host_uid must name users that this root may become (/proc/self/uid_map lists them)"


@dataclass(frozen=True, slots=True)
class HostIds:
    """Numbers (first and how many of the users, then of the groups, where they differ), or why there are none."""

    ids: tuple[int, ...] = ()
    why_not: str = ""


def find_subordinates(etc: Path = _ETC) -> HostIds:
    """The largest ranges of this user."""
    if os.geteuid() == 0:
        return HostIds(why_not="root's pools do not use /etc/subuid")
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return HostIds(why_not=f"this host has no {' and no '.join(missing)}")
    found: tuple[int, ...] = ()
    for name in ("subuid", "subgid"):
        first, number = _largest(etc / name)
        if number < BLOCK:
            return HostIds(why_not=f"{etc / name} gives user {_names()[0]} {number:,} ids; {BLOCK:,} are needed")
        found += (first, number)
    return HostIds(found)


def _largest(path: Path) -> tuple[int, int]:
    """First and number of this user's largest range in a file; no ids where there is none."""
    best, names = (0, 0), _names()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return best
    for line in lines:
        fields = line.split(":")
        if len(fields) == 3 and fields[0] in names and fields[1].isdecimal() and fields[2].isdecimal():
            best = max(best, (int(fields[1]), int(fields[2])), key=lambda found: found[1])
    return best


def _names() -> tuple[str, ...]:
    """The words for this user in those files."""
    uid = os.getuid()
    try:
        return pwd.getpwuid(uid).pw_name, str(uid)
    except KeyError:
        return (str(uid),)
