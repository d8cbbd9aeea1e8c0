"""What a machine may hold and use."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mettle.errors import UserError
from mettle.sandbox.machines.egress import proxy_environment
from mettle.sandbox.machines.network import Network
from mettle.sandbox.zygote.rootfs import PROGRAMS
from mettle.sandbox.zygote.settings import MachineLimits

_FILES_PER_MB = 128
_MIN_FILES = 4096
_MAX_OPEN_FILES = 1024
_DAY_S = 86_400
_MAX_ENVIRONMENT_BYTES = 48 << 10  # as it is sent to the template, whose messages have 64 kB
_ENVIRONMENT = {
    "PATH": f"{PROGRAMS}:/usr/local/bin:/usr/bin:/bin",
    "HOME": "/work",
    "LANG": "C.UTF-8",
    "SHELL": "/bin/sh",
    "USER": "code",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """One machine's limits, lifetime and first contents.

    `memory_mb` is of all its processes together, `disk_mb` of all its files (they live in memory, too). `cpus` is how
    many processors its processes may keep busy, all together; only a cgroup can hold them to it, so that a host without
    the cpu controller refuses the machine; None is without limit. `lifetime_s` counts from its making, `idle_s` from
    the end of the last order; None is without end. `files` maps paths (relative ones are below /work) to contents.
    `labels` are the caller's own. `network` is None for none at all, or `{"allow": ["host:port", ...]}` (see
    `network.py`): an HTTP proxy that the machine's environment names lets these through. `image` is of backends of
    containers; None is the backend's own. The embedded one has `sandbox.host_images` and refuses others.
    """

    memory_mb: int = 512
    disk_mb: int = 256
    max_processes: int = 64
    cpus: float | None = None
    lifetime_s: float | None = 3600.0
    idle_s: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes | str | Path] = field(default_factory=dict)
    network: Mapping[str, Any] | None = None
    image: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("memory_mb", 16), ("disk_mb", 1), ("max_processes", 1)):
            if getattr(self, name) < least:
                raise UserError(f"a machine's {name} is {getattr(self, name)}; it must be at least {least}")
        for name in ("lifetime_s", "idle_s", "cpus"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"a machine's {name} is {value}; it must be more than 0, or None")
        self.reach()

    def reach(self) -> Network | None:
        """What it may reach; None for nothing. Raises: UserError for rules that cannot be read."""
        return None if self.network is None else Network.read(self.network)

    def limits(self) -> MachineLimits:
        """What process 1 of the machine is told."""
        environment = {**_ENVIRONMENT, **(proxy_environment() if self.network else {}), **check_environment(self.env)}
        num_bytes = len(json.dumps(environment))
        if num_bytes > _MAX_ENVIRONMENT_BYTES:
            raise UserError(
                f"a machine's environment has {num_bytes:,} bytes; it may have {_MAX_ENVIRONMENT_BYTES:,}: put what is "
                "long into a file"
            )
        return MachineLimits(
            memory_bytes=self.memory_mb << 20,
            disk_bytes=self.disk_mb << 20,
            max_files=max(_MIN_FILES, self.disk_mb * _FILES_PER_MB),
            max_processes=self.max_processes,
            max_open_files=_MAX_OPEN_FILES,
            cpu_s=math.ceil(self.lifetime_s or _DAY_S),
            environment=environment,
            num_cpus=self.cpus or 0.0,
        )


def check_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables as they are; UserError for one that no process can have."""
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UserError(f"environment variable {name!r} is {value!r}; names and values must be strings")
        if not name or "=" in name or "\0" in name + value:
            raise UserError(f"environment variable {name!r} cannot be set: an empty name, '=' or a zero byte")
    return dict(env)
