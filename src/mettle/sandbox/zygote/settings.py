"""What the owner tells a template once, and what every cell of it obeys."""

from __future__ import annotations

import json
from typing import NamedTuple


class Settings(NamedTuple):
    """Plain data, passed as JSON on the template's command line; it holds nothing about any task."""

    control_fd: int
    owner_pid: int
    is_jailed: bool  # False only for the backend that is called `unsafe`
    host_uid: int  # the ordinary user that a template started by root becomes
    max_processes: int
    max_open_files: int
    max_file_bytes: int
    disk_bytes: int
    max_disk_files: int
    scratch: str  # where tests without a jail get their directories
    packages: tuple[str, ...]  # files and directories that appear read-only in /packages

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> Settings:
        values = json.loads(text)
        return cls(**{**values, "packages": tuple(values["packages"])})


class MachineLimits(NamedTuple):
    """What one machine may hold and use; sent with the order that makes it."""

    memory_bytes: int
    disk_bytes: int
    max_files: int
    max_processes: int
    max_open_files: int
    cpu_s: int  # of each process
    environment: dict[str, str]
    num_cpus: float = 0.0  # of all its processes together, where a cgroup can hold them to it; 0 is without limit
    is_memory_counted: bool = False  # by the cgroup that it is to enter
