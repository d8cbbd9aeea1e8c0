"""Settings of the Hub's server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mettle.config.options import Option
from mettle.hub.oidc.config import OidcConfig
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.service.config import QuotaConfig
from mettle.trainer.service.config import ServiceLimits


class HubConfig(BaseModel):
    """What the Hub is started with."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    runs: Path = Path("runs")
    """A folder of run directories, or one run directory."""

    workspace: Path = Path()
    """Folder under which evaluations are looked for, in `outputs/evals` and `environments/*/outputs/evals`."""

    data: Path = Path("hub")
    """Folder of the Hub itself: accounts, environments, pushed results. Made where it is missing."""

    database: str = ""
    """Address of a PostgreSQL database, as `postgresql+psycopg://me@host/hub`; empty is SQLite inside `data`."""

    blobs: str = ""
    """Address of an object store for wheels and sources, as `s3://bucket/prefix`; empty is a folder inside `data`."""

    models: Path = Path("models")
    """Folder of model directories (Hugging Face layout) that hosted runs can start from; a tiny one is always there."""

    upstream_index: str = ""
    """Package index that pip is sent to for names that nobody has on this Hub, private ones included; empty: none."""

    check_pushes: bool = True
    """Whether what is pushed is installed, loaded and given its quality card, in a sandbox of this machine."""

    check_reach: list[str] = []
    """What those sandboxes reach, as host:port; nothing by default. Name here where data is downloaded from."""

    work_here: bool = True
    """Whether this machine itself runs hosted evaluations and training; off leaves evaluations to joined ones."""

    served_models: int = Field(default=1, ge=0, le=16)
    """Models that this machine answers with at a time under `/v1`, each in a process of its own that begins when it is
    asked for; 0: none."""

    served_idle_s: float = Field(default=300.0, gt=0)
    """Seconds without a question after which such a process ends, and gives its memory back."""

    train_models: list[str] = []
    """Models in `models` that programs of the `tinker` SDK may train adapters on, under `/train/NAME`: as `DIRECTORY`,
    or `DIRECTORY=org/model` where clients ask for another name. Each has a process of its own while the Hub runs."""

    train: ServiceLimits = Field(default_factory=ServiceLimits)
    """What such a process takes of each person and of this machine."""

    lease_s: float = Field(default=30.0, ge=2, le=3600)
    """Seconds that a machine which has joined may be silent before its work is given to another."""

    open_runs: bool | None = None
    """Whether runs and evaluations of this machine are shown without signing in. By default only on loopback."""

    oidc: OidcConfig = Field(default_factory=OidcConfig)
    """Sign-in through a provider of identities, beside that by password."""

    sandboxes: bool = True
    """Whether sandboxes are offered here, to tokens with `sandboxes:write`. Started when they are first asked for."""

    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """The pools that sandboxes come from, as of `mettle sandbox serve`."""

    quota: QuotaConfig = Field(default_factory=QuotaConfig)
    """Sandboxes that one person may have at a time."""

    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback, put it behind TLS: passwords and tokens travel as they are."""

    port: int = Field(default=7860, ge=0, le=65535)
    """Port; 0 takes any free one."""

    ready_file: Annotated[Path | None, Option(is_argument=True)] = None
    """Written when the server answers: {"base_url", "host", "port", "pid"}."""
