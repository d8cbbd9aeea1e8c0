"""Engines to sample with: one for each set of weights in use, a copy of the base with an adapter's products added.

Parts: `SamplerPool`. An engine is made when it is asked for, and closed when another needs its place and nobody uses
it. Invariant: engines share no keys and values: a prefix computed with one adapter is never read with another.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mettle.clients.renderer import Renderer
from mettle.inference.bridge import Bridge
from mettle.inference.config import InferenceConfig
from mettle.inference.engine.embedded import start_engine
from mettle.trainer.merging import write_merged
from mettle.trainer.service.config import TrainServeConfig
from mettle.trainer.service.core import LoraCore
from mettle.trainer.service.folders import WeightFolders


@dataclass(slots=True)
class _Entry:
    bridge: Bridge
    num_users: int = 0


class SamplerPool:
    """At most `max_samplers` engines. Used in the event loop."""

    def __init__(self, core: LoraCore, config: TrainServeConfig, weights: WeightFolders, renderer: Renderer) -> None:
        self._core, self._config, self._weights, self._renderer = core, config, weights, renderer
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._changed = asyncio.Condition()
        self._loading: set[str] = set()

    @asynccontextmanager
    async def using(self, folder: str) -> AsyncIterator[Bridge]:
        """The engine of an adapter's folder; "" is the base alone."""
        entry = await self._entry(folder)
        try:
            yield entry.bridge
        finally:
            async with self._changed:
                entry.num_users -= 1
                self._changed.notify_all()

    async def close(self) -> None:
        """Stop all engines; what they sample is aborted."""
        for entry in self._entries.values():
            await asyncio.to_thread(entry.bridge.engine.close)
        self._entries.clear()

    @property
    def folders(self) -> list[str]:
        """Those of the engines in memory."""
        return list(self._entries)

    async def drop(self, folder: str) -> None:
        """Close an engine that nobody uses."""
        async with self._changed:
            entry = self._entries.get(folder)
            if entry is None or entry.num_users:
                return
            del self._entries[folder]
        await asyncio.to_thread(entry.bridge.engine.close)

    async def _entry(self, folder: str) -> _Entry:
        async with self._changed:
            while True:
                entry = self._entries.get(folder)
                if entry is not None:
                    self._entries.move_to_end(folder)
                    entry.num_users += 1
                    return entry
                if folder not in self._loading and await self._has_room():
                    self._loading.add(folder)
                    break
                await self._changed.wait()
        try:
            engine = await asyncio.to_thread(self._start, folder)
        except BaseException:
            async with self._changed:
                self._loading.discard(folder)
                self._changed.notify_all()
            raise
        async with self._changed:
            self._loading.discard(folder)
            entry = self._entries[folder] = _Entry(Bridge(engine), 1)
            self._changed.notify_all()
        return entry

    async def _has_room(self) -> bool:
        """Make room if somebody has to go who can."""
        while len(self._entries) + len(self._loading) >= self._config.max_samplers:
            idle = next((name for name, entry in self._entries.items() if not entry.num_users), None)
            if idle is None:
                return False
            entry = self._entries.pop(idle)
            await asyncio.to_thread(entry.bridge.engine.close)
        return True

    def _start(self, folder: str) -> Any:
        config = self._config
        with tempfile.TemporaryDirectory(prefix="merged-", dir=config.data) as scratch:
            model = config.base_model
            if folder:
                model = write_merged(config.base_model, self._weights.path(folder), Path(scratch) / "model")
            settings = InferenceConfig(
                model=model,
                max_slots=config.max_sequences,
                max_model_len=self._core.max_length,
                max_queue=config.max_waiting * 16,
                device=config.device,
                num_threads=config.num_threads,
            )
            return start_engine(
                settings,
                eos_token_ids=self._renderer.stop_token_ids,
                decode_text=lambda ids: self._renderer.decode(ids, skip_special_tokens=False),
            )
