"""Settings of the Hub's server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mettle.config.options import Option


class HubConfig(BaseModel):
    """What `python -m mettle.hub` is started with."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    runs: Path = Path("runs")
    """A folder of run directories, or one run directory."""

    workspace: Path = Path()
    """Folder under which evaluations are looked for, in `outputs/evals` and `environments/*/outputs/evals`."""

    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback, anybody who reaches it can read every rollout and log."""

    port: int = Field(default=7860, ge=0, le=65535)
    """Port; 0 takes any free one."""

    ready_file: Annotated[Path | None, Option(is_argument=True)] = None
    """Written when the server answers: {"base_url", "host", "port", "pid"}."""
