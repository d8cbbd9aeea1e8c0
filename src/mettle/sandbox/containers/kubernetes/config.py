"""Settings of the backend `kubernetes`: the table `[sandbox.kubernetes]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class KubernetesConfig(BaseModel):
    """Which cluster, and what its pods are like."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kubeconfig: Path | None = None
    """File with the cluster's address and credentials. Without it, the pod's own service account inside a cluster, or
    else KUBECONFIG, or ~/.kube/config."""

    context: str | None = None
    """Context of the kubeconfig; without it, its current one."""

    namespace: str | None = None
    """Where pods are made; without it, the context's, or the service account's, or `default`."""

    pool: str = Field(default="default", pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")
    """Name of the warm pool. Owners in one namespace with the same name share the pods that wait in it."""

    image: str = "python:3.12-slim"
    """The image of machines that name none. It needs a Python of at least 3.10 and a shell."""

    pull: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    """When nodes pull an image."""

    pull_secrets: tuple[str, ...] = ()
    """Secrets of the namespace for the registries of the images."""

    interpreter: str = "python3"
    """The Python of the images: a name in their PATH, or a path."""

    user: int = Field(default=1000, ge=1, le=(1 << 31) - 1)
    """Number of the user and group that everything inside runs as."""

    runtime_class: str | None = None
    """RuntimeClass of the pods. Without it, `gvisor` when the cluster has one of that name, or else none."""

    network: Literal["none", "open"] = "none"
    """`none`: a NetworkPolicy lets nothing out, and in only to the agent's port; the cluster's network must enforce
    it, which is tried from inside. `open`: no policy, and the report says so."""

    network_targets: tuple[str, ...] = ()
    """More addresses, as `host:port`, that must not answer from inside; the API server's and the cloud's metadata
    address are always tried."""

    port: int = Field(default=8790, ge=1024, le=65_535)
    """Port of the agent in each pod."""

    cpus: float = Field(default=1.0, gt=0, le=1024)
    """Processors that a machine may keep busy when it does not say."""

    requested_share: float = Field(default=0.25, gt=0, le=1)
    """Share of a machine's memory and processors that the scheduler sets aside for it; 1 is all, and packs least."""

    node_selector: dict[str, str] = {}
    """Labels of the nodes that may run pods."""

    tolerations: tuple[dict[str, Any], ...] = ()
    """Taints that pods bear, as a pod's `tolerations`."""

    warm: int = Field(default=2, ge=0, le=4096)
    """Pods of the default shape that wait in the pool, kept up by whichever owner sees that some are missing."""

    max_lifetime_s: int = Field(default=24 * 3600, ge=60)
    """The longest that any pod lives (`activeDeadlineSeconds`), waiting included."""

    lease_s: int = Field(default=60, ge=15, le=3600)
    """How long after the last sign of an owner its pods may be removed by others."""

    max_requests: int = Field(default=16, ge=1, le=1024)
    """Requests to the API server at the same time."""

    start_timeout_s: float = Field(default=180.0, gt=0)
    """How long a pod may take from its creation to its agent's first word, scheduling and pull included."""

    patience_s: float = Field(default=30.0, ge=0)
    """How long an API server that is away, or busy (429, 503), is waited for."""
