"""How a run lets workers from outside sample for it."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class OutsideConfig(BaseModel):
    """Workers from outside, `mettle rl work`: present, the run has a door for them; absent, it has none."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """Address of the door. Workers elsewhere reach it at an address of this machine, or through a proxy with TLS."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port of the door; 0 takes a free one, which `mettle rl invite` then names."""

    lease_s: float = Field(default=30.0, gt=0)
    """Seconds without a word from a worker after which what it was given goes to others."""

    max_lease_s: float = Field(default=600.0, gt=0)
    """Seconds after which a request goes to others although its worker still says that it works on it."""

    max_lag: int = Field(default=1, ge=0)
    """Versions that a worker may be behind and still be given work that trains, so that it has some while it fetches
    the newest. At most orchestrator.max_staleness; evaluations are always of the version that is served."""

    check_share: float = Field(default=1.0, gt=0, le=1)
    """Part of the completions of each answer that is computed again before any of them is used, at least one. Which
    ones is drawn anew each time."""

    tolerance: float | None = Field(default=None, gt=0)
    """Largest mean difference, in nats, between the log-probabilities of a completion there and here; one token may be
    20 times as far off. By default 1e-4 in float32, where honest workers show 4e-6, and .02 in bfloat16."""

    max_share: float = Field(default=1.0, gt=0, le=1)
    """Largest part of the completions under way that workers from outside may have. The run's own engine does the
    rest, and whatever they leave undone."""

    folder: Path | None = None
    """Where invitations and the list of workers are kept; a run has its own."""
