"""Settings of the Hub's server."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class HubConfig(BaseModel):
    """What `python -m mettle.hub` is started with."""

    model_config = ConfigDict(extra="forbid")

    runs: Path
    """A folder of run directories, or one run directory."""

    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback, anybody who reaches it can read every rollout and log."""

    port: int = Field(default=7860, ge=0, le=65535)
    """Port; 0 takes any free one."""

    ready_file: Path | None = None
    """Written when the server answers: {"base_url", "host", "port", "pid"}."""
