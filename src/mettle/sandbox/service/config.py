"""Settings of the sandbox service: where it listens, what it runs on, and how much each token may have."""

from __future__ import annotations

import ipaddress
import tempfile
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mettle.sandbox.config import SandboxConfig


class QuotaConfig(BaseModel):
    """The most that one token may have at a time. A token in the tokens file may have figures of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_machines: int = Field(default=500, ge=0)
    """Machines that exist."""

    max_memory_mb: int | None = Field(default=None, ge=0)
    """Their memory limits, together; left out: as much as the host (or the container that the service runs in) has."""

    max_disk_mb: int | None = Field(default=None, ge=0)
    """Their disk limits, together; left out: as much as the host has memory, where the embedded backend keeps them."""

    max_cpus: float | None = Field(default=None, ge=0)
    """Processors that they may keep busy, together (`cpus`; one without counts `uncapped_cpus` of the service); left
    out: as many as the service gives out on its host (`cpus_per_core`)."""

    max_judging: int = Field(default=256, ge=0)
    """Judgements asked for and not yet answered; more are told to come back."""

    max_requests: int = Field(default=1024, ge=1)
    """Requests being answered, long ones (commands, streams, ports) included."""

    max_requests_per_s: float = Field(default=2000.0, gt=0)
    """Requests begun per second, after a burst of as many."""

    def filled(self, memory_mb: int, cpus: float) -> Self:
        """With `memory_mb` where nothing was said of memory and disks, and `cpus` where nothing was of processors."""
        given = {name: value for name, value in self.model_dump().items() if value is not None}
        whole = {"max_memory_mb": memory_mb, "max_disk_mb": memory_mb, "max_cpus": cpus, **given}
        return type(self).model_validate(whole)


class ServiceConfig(BaseModel):
    """What `mettle sandbox serve` does."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = Field(default=8300, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""

    unix: Path | None = None
    """Listen on this Unix socket instead, for its own user only; no token is needed there."""

    tls_cert: Path | None = None
    """Speak TLS with this certificate (PEM, its chain behind it); plain HTTP, if left out."""

    tls_key: Path | None = None
    """Its private key (PEM, without a password); in the certificate's own file, if left out."""

    public_url: str | None = Field(default=None, pattern=r"^https?://[^/\s?#]+$")
    """Where `prime` clients are sent for commands and files, such as https://sandboxes.example; the address that they
    came to, if left out. To be given where a certificate has a name, or something stands in front of the service."""

    tokens_file: Path | None = None
    """The hashes of tokens that `mettle sandbox token` has made; read again whenever it changes."""

    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """The pools that it serves, with `max_running` as the number of judgements at a time."""

    quota: QuotaConfig = Field(default_factory=QuotaConfig)
    """What a token gets that has no quota of its own."""

    spare_memory_mb: int = Field(default=256, ge=0)
    """What has to stay free on the host: a machine whose memory limit would go into it is told to come back."""

    cpus_per_core: float = Field(default=4.0, gt=0)
    """Processors given out to machines for each core of the host (or of the container that the service runs in). Most
    machines wait most of the time; 1 gives nothing out twice. A machine beyond it is told to come back."""

    uncapped_cpus: float = Field(default=1 / 64, gt=0)
    """What a machine without `cpus` counts as: with the default, a core takes 256 of them."""

    lease_s: float = Field(default=60.0, gt=0)
    """A client that has not been heard of for so long has gone, and its machines end."""

    max_body_mb: int = Field(default=1024, ge=1)
    """The longest upload, snapshots included."""

    max_json_mb: int = Field(default=192, ge=1)
    """The longest JSON body: a judgement with its tests, a command with its input."""

    max_output_mb: int = Field(default=64, ge=1)
    """The most output of a command that its result may ask to keep."""

    max_transfers: int = Field(default=8, ge=1)
    """Snapshots and files of machines that are held in memory at a time on their way; others wait."""

    stall_s: float = Field(default=60.0, gt=0)
    """A client that takes or sends nothing for so long in the middle of a transfer is hung up on."""

    spool_dir: Path = Field(default_factory=lambda: Path(tempfile.gettempdir()))
    """Where uploads wait until they are complete."""

    idle_exit_s: float | None = Field(default=None, gt=0)
    """End when there has been no machine and no request for so long; never, if left out."""

    grace_s: float = Field(default=10.0, ge=0)
    """How long requests may go on after the signal to end."""

    @property
    def is_in_the_open(self) -> bool:
        """Whether other hosts reach it over plain HTTP."""
        return self.unix is None and self.tls_cert is None and not is_this_host(self.host)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("tls_key needs tls_cert, the certificate that it is the key of")
        if self.tls_cert is not None and self.unix is not None:
            raise ValueError("tls_cert is for a network; leave it out, or leave out unix")
        return self


def is_this_host(name: str) -> bool:
    """Whether what is sent there stays on this host."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
