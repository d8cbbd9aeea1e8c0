"""What an engine of any kind is told by who opens it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mettle.errors import MettleError
from mettle.inference.engine.sequences import DecodeText

OnDeath = Callable[[MettleError], None]


class EngineHooks(NamedTuple):
    """Where an answer ends, how its text is read, who is told that the engine has died, where child processes write."""

    eos_token_ids: tuple[int, ...]
    decode_text: DecodeText | None
    on_death: OnDeath | None
    logs: Path | None
