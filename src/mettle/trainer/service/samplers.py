"""What is sampled with: one engine of the base with adapters in it, a request's rows each with its own.

An adapter that the engine has no rows for (of a router; any of a model of transformers' own forward) gets an engine of
its own, of a copy of the base with its products added. Weights are loaded when they are asked for, and go when others
need their place and nobody uses them. Parts: `SamplerPool`, `SamplingWeights`. Invariant: no prefix computed with one
adapter is read with another.
"""

from __future__ import annotations

import asyncio
import logging
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
from mettle.inference.engine.protocol import WeightsRejected
from mettle.trainer.merging import write_merged
from mettle.trainer.service.config import TrainServeConfig
from mettle.trainer.service.core import LoraCore
from mettle.trainer.service.folders import WeightFolders

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SamplingWeights:
    """An engine, and the name that it has for an adapter; "" where it has the weights themselves."""

    bridge: Bridge
    adapter: str
    num_users: int = 1

    @property
    def is_merged(self) -> bool:
        return not self.adapter


class SamplerPool:
    """At most `max_adapters` adapters and `max_samplers` merged copies. Used in the event loop."""

    def __init__(self, core: LoraCore, config: TrainServeConfig, weights: WeightFolders, renderer: Renderer) -> None:
        self._core, self._config, self._weights, self._renderer = core, config, weights, renderer
        self._base: Bridge | None = None
        self._loaded: OrderedDict[str, SamplingWeights] = OrderedDict()
        self._changed = asyncio.Condition()
        self._is_loading = False

    @asynccontextmanager
    async def using(self, folder: str) -> AsyncIterator[SamplingWeights]:
        """The weights of an adapter's folder; "" is the base alone."""
        weights = await self._take(folder)
        try:
            yield weights
        finally:
            async with self._changed:
                weights.num_users -= 1
                self._changed.notify_all()

    async def close(self) -> None:
        """Stop all engines; what they sample is aborted."""
        engines = [each.bridge for each in self._loaded.values() if each.is_merged]
        self._loaded.clear()
        for bridge in [*engines, *([self._base] if self._base else [])]:
            await asyncio.to_thread(bridge.engine.close)

    @property
    def folders(self) -> list[str]:
        """Those that are loaded."""
        return list(self._loaded)

    async def drop(self, folder: str) -> None:
        """Free weights that nobody uses."""
        async with self._changed:
            weights = self._loaded.get(folder)
            if weights is None or weights.num_users:
                return
            del self._loaded[folder]
        await self._free(weights)

    async def _take(self, folder: str) -> SamplingWeights:
        if not folder and self._base is not None:
            return SamplingWeights(self._base, "")
        async with self._changed:
            while True:
                found = self._loaded.get(folder)
                if found is not None:
                    self._loaded.move_to_end(folder)
                    found.num_users += 1
                    return found
                # One at a time: each load decides by what is there whether somebody has to go.
                if not self._is_loading and (
                    not folder or await self._has_room(self._config.max_adapters, is_merged=False)
                ):
                    self._is_loading = True
                    break
                await self._changed.wait()
        try:
            weights = await self._load(folder)
        except BaseException:
            await self._end_loading()
            raise
        if folder:
            self._loaded[folder] = weights
        await self._end_loading()
        return weights

    async def _end_loading(self) -> None:
        async with self._changed:
            self._is_loading = False
            self._changed.notify_all()

    async def _load(self, folder: str) -> SamplingWeights:
        if self._base is None:
            self._base = Bridge(await asyncio.to_thread(self._start, self._config.base_model))
        if not folder:
            return SamplingWeights(self._base, "")
        path = self._weights.path(folder)
        try:
            await asyncio.to_thread(self._base.engine.load_adapter, folder, path)
        except WeightsRejected as error:
            logger.info("sampling with a merged copy of the base", extra={"reason": str(error)})
        else:
            return SamplingWeights(self._base, folder)
        async with self._changed:
            while not await self._has_room(self._config.max_samplers, is_merged=True):
                await self._changed.wait()
        return SamplingWeights(Bridge(await asyncio.to_thread(self._start_merged, path)), "")

    async def _has_room(self, limit: int, *, is_merged: bool) -> bool:
        """Make room among the adapters or the copies, if somebody has to go who can."""
        while sum(each.is_merged == is_merged for each in self._loaded.values()) >= limit:
            idle = [n for n, each in self._loaded.items() if each.is_merged == is_merged and not each.num_users]
            if not idle:
                return False
            await self._free(self._loaded.pop(idle[0]))
        return True

    async def _free(self, weights: SamplingWeights) -> None:
        engine = weights.bridge.engine
        if weights.is_merged:
            await asyncio.to_thread(engine.close)
        else:
            await asyncio.to_thread(engine.unload_adapter, weights.adapter)

    def _start_merged(self, adapter: Path) -> Any:
        with tempfile.TemporaryDirectory(prefix="merged-", dir=self._config.data) as scratch:
            return self._start(write_merged(self._config.base_model, adapter, Path(scratch) / "model"))

    def _start(self, model: Path) -> Any:
        config = self._config
        settings = InferenceConfig(
            model=model,
            max_slots=config.max_sequences,
            max_model_len=self._core.max_length,
            max_queue=config.max_waiting * 16,
            max_adapters=config.max_adapters,
            device=config.device,
            num_threads=config.num_threads,
        )
        return start_engine(
            settings,
            eos_token_ids=self._renderer.stop_token_ids,
            decode_text=lambda ids: self._renderer.decode(ids, skip_special_tokens=False),
        )
