"""Settings of the backend `docker`: the table `[sandbox.docker]`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class DockerConfig(BaseModel):
    """Where the daemon is, and what its containers are like."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str | None = None
    """`unix:///path`, or `tcp://name:port`. Without it, DOCKER_HOST, or else unix:///var/run/docker.sock."""

    cert_path: Path | None = None
    """Directory with `ca.pem`, `cert.pem` and `key.pem` for TLS. Without it, DOCKER_CERT_PATH where DOCKER_TLS_VERIFY
    is set. A daemon on tcp is spoken to without TLS only at a loopback address."""

    image: str = "python:3.12-slim"
    """The image of machines that name none. It needs a Python of at least 3.10 and a shell."""

    pull: Literal["missing", "always", "never"] = "missing"
    """When an image is pulled. `always` asks the registry once per pool and image."""

    registry_auth_env: str | None = None
    """Environment variable with `user:password` for the registry of the images, if it asks for one."""

    interpreter: str = "python3"
    """The Python of the images: a name in their PATH, or a path."""

    user: str = Field(default="1000:1000", pattern=r"^\d+:\d+$")
    """Number of the user and group that everything inside runs as; not 0."""

    runtime: str | None = None
    """OCI runtime. Without it, `runsc` (gVisor) when the daemon lists it, or else the daemon's own default."""

    network: str = "none"
    """Docker network of the machines. Other than `none` it lets code out, and the report says so."""

    cpus: float = Field(default=1.0, gt=0, le=1024)
    """Processors that a machine may keep busy when it does not say."""

    warm: int = Field(default=2, ge=0, le=4096)
    """Containers of the default shape kept ready ahead of time, about 15 MB each."""

    max_starting: int = Field(default=8, ge=1, le=256)
    """Containers that are made at the same time; more of them wait."""

    start_timeout_s: float = Field(default=60.0, gt=0)
    """How long a container may take from its creation to its agent's first word, the pull apart."""

    pull_timeout_s: float = Field(default=1800.0, gt=0)
    """How long the pull of one image may take."""

    patience_s: float = Field(default=20.0, ge=0)
    """How long a daemon that is away, or busy (429, 503), is waited for."""
