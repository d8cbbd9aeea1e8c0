"""What the owner tells a template once, and what every cell of it obeys."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

MAX_MESSAGE_BYTES: Final = 1 << 16
"""Of an order to the template, which reads each in one piece."""


class Settings(NamedTuple):
    """Plain data, passed as JSON on the template's command line; it holds nothing about any task."""

    control_fd: int
    owner_pid: int
    is_jailed: bool  # False for the backend that is called `unsafe`, and where Landlock is all there is
    is_landlocked: bool  # each test is one process, held by Landlock and seccomp, in no namespace of its own
    host_uid: int  # the ordinary user that a template started by root becomes
    max_processes: int
    max_open_files: int
    max_file_bytes: int
    disk_bytes: int
    max_disk_files: int
    scratch: str  # where tests without namespaces get their directories
    packages: tuple[str, ...]  # files and directories that appear read-only in /packages
    preload: tuple[str, ...]  # modules of these packages that are imported before anything is cloned
    host_paths: tuple[str, ...]  # what else of the host appears, read-only, under its own name
    host_ids: tuple[int, int] = (1, 0)  # first and number of the users from which root's template takes a block
    sub_ids: tuple[int, ...] = ()  # of an ordinary user: first and number of its users, then of its groups
    why_no_sub_ids: str = ""
    may_use_event: bool = True  # count a test's processor time by an inherited event of the kernel's
    outside_id: int = 1000  # the user and group that a cell or machine is, as the template's namespace counts

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> Settings:
        values = json.loads(text)
        tuples: dict[str, Any] = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **tuples})


class CellLimits(NamedTuple):
    """Of a cell that is not like all others: sent with the order that makes it, in place of the settings' own."""

    max_processes: int
    disk_bytes: int
    max_file_bytes: int
    has_program: bool  # with a directory for files that process 1 writes and the code can only read

    def of(self, settings: Settings) -> Settings:
        """The settings that this cell obeys."""
        return settings._replace(
            max_processes=self.max_processes, disk_bytes=self.disk_bytes, max_file_bytes=self.max_file_bytes
        )


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
