"""What the daemon is asked to make, as the Engine API spells it.

Invariant: every protection is asked for by name here, whatever the daemon's defaults are; what holds in the end is
measured from inside.
"""

from __future__ import annotations

from typing import Any, Final

from mettle.sandbox.containers.agent.cells import PROGRAMS
from mettle.sandbox.containers.bundle import FOLDER, agent_command
from mettle.sandbox.containers.docker.config import DockerConfig
from mettle.sandbox.containers.pool import Shape

_AGENT_MB: Final = 64  # beside what the machine may use: the agent, and a worker
_AGENT_PROCESSES: Final = 16
_SHM_MB: Final = 64
_OPEN_FILES: Final = 4096


def container_body(
    config: DockerConfig,
    shape: Shape,
    image_id: str,
    runtime: str | None,
    volume: str,
    labels: dict[str, str],
    *,
    is_podman: bool = False,
) -> dict[str, Any]:
    """The container of a machine."""
    interpreter, *arguments = agent_command(config.interpreter, "--stdio")
    return {
        "Image": image_id,
        "Hostname": "sandbox",
        "User": config.user,
        "WorkingDir": "/work",
        "Entrypoint": [interpreter],
        "Cmd": arguments,
        "Env": [],
        "Labels": labels,
        "Tty": False,
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "NetworkDisabled": config.network == "none",
        "Healthcheck": {"Test": ["NONE"]},
        "StopTimeout": 1,
        "HostConfig": _host_config(config, shape, runtime, volume, is_podman=is_podman),
    }


def _host_config(
    config: DockerConfig, shape: Shape, runtime: str | None, volume: str, *, is_podman: bool
) -> dict[str, Any]:
    memory = shape.memory_mb + shape.disk_mb + _SHM_MB + _AGENT_MB << 20  # files in memory are counted, too
    return {
        "ReadonlyRootfs": True,
        "Tmpfs": _tmpfs(config, shape, is_podman=is_podman),
        "Mounts": [_agent_mount(volume, is_read_only=True)],
        "ShmSize": _SHM_MB << 20,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges:true"],
        "Privileged": False,
        "NetworkMode": config.network,
        "IpcMode": "private",
        "Memory": memory,
        "MemorySwap": memory,
        "NanoCpus": int(shape.cpus * 1e9),
        "PidsLimit": shape.max_processes + _AGENT_PROCESSES,
        "OomScoreAdj": 500,
        "Ulimits": [
            {"Name": "core", "Soft": 1, "Hard": 1},
            {"Name": "nofile", "Soft": _OPEN_FILES, "Hard": _OPEN_FILES},
        ],
        "LogConfig": {"Type": "none", "Config": {}},
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,  # what became of it can be asked afterwards
        "Init": False,
        **({"Runtime": runtime} if runtime else {}),
    }


def _tmpfs(config: DockerConfig, shape: Shape, *, is_podman: bool) -> dict[str, str]:
    """Owned by who runs everything inside, whoever owns the image's own directory; Podman spells that `U`."""
    user, _, group = config.user.partition(":")
    owner = "U" if is_podman else f"uid={user},gid={group}"
    options = f"rw,exec,nosuid,nodev,size={shape.disk_mb << 20},{owner}"
    return {"/work": f"{options},mode=0755", "/tmp": f"{options},mode=1777", PROGRAMS: f"{options},mode=0755"}


def _agent_mount(volume: str, *, is_read_only: bool) -> dict[str, Any]:
    return {
        "Type": "volume",
        "Source": volume,
        "Target": FOLDER,
        "ReadOnly": is_read_only,
        "VolumeOptions": {"NoCopy": True},
    }


def filler_body(image_id: str, volume: str, labels: dict[str, str]) -> dict[str, Any]:
    """A container that is never started: the archive API writes into the volume through it."""
    return {
        "Image": image_id,
        "Entrypoint": ["true"],
        "Cmd": [],
        "Labels": labels,
        "NetworkDisabled": True,
        "HostConfig": {"NetworkMode": "none", "Mounts": [_agent_mount(volume, is_read_only=False)]},
    }
