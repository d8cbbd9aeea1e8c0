"""An engine that is open to workers from outside, with its door, and the workers that come."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mettle.clients.renderer import Renderer
from mettle.inference.bridge import Bridge
from mettle.inference.config import InferenceConfig
from mettle.inference.engine.protocol import Generation, GenerationRequest
from mettle.inference.launch import open_engine
from mettle.inference.outside.config import OutsideConfig
from mettle.inference.outside.door import OutsideDoor
from mettle.inference.outside.engine import OutsideEngine
from mettle.inference.outside.roster import OutsideWorker, invite, read_roster
from mettle.inference.outside.signatures import WorkerKey
from mettle.inference.outside.worker import OutsideClient, OutsideWorking, Sample, WorkPlace
from mettle.records.sampling import SamplingParams
from mettle.web.server import bind

logger = logging.getLogger(__name__)


PROMPT = [72, 101, 108, 108, 111]


@dataclass
class OpenHouse:
    engine: OutsideEngine
    door: OutsideDoor
    bridge: Bridge
    folder: Path
    workers: list[tuple[OutsideWorking, asyncio.Task[Any]]] = field(default_factory=list)
    num_requests: int = 0

    @classmethod
    async def open(cls, model: Path, folder: Path, *, port: int = 0, **settings: Any) -> OpenHouse:
        return await cls.beside(
            InferenceConfig(model=model, max_slots=16, seed=0, num_threads=1), folder, port, **settings
        )

    @classmethod
    async def beside(cls, own: InferenceConfig, folder: Path, port: int = 0, **settings: Any) -> OpenHouse:
        """With the engine of any config as its own."""
        model = own.model
        config = own.model_copy(update={"outside": OutsideConfig(folder=folder, **settings)})
        config = InferenceConfig.model_validate(config.model_dump())
        renderer = Renderer.from_directory(model)
        engine = await asyncio.to_thread(
            open_engine, config, eos_token_ids=renderer.stop_token_ids, decode_text=renderer.visible_text
        )
        assert isinstance(engine, OutsideEngine)
        engine._rng = random.Random(0)
        door = OutsideDoor(engine, folder, model, "house", "float32")
        await door.start(bind("127.0.0.1", port))
        return cls(engine, door, Bridge(engine), folder)

    def worker(
        self,
        place: Path,
        name: str = "ann",
        *,
        sample: Sample | None = None,
        tell: Callable[[str], None] = logger.info,
        token: str = "",
        **settings: Any,
    ) -> OutsideWorking:
        """A worker that begins to work."""
        client = self.client(place, name, token)
        working = OutsideWorking(client, WorkPlace(place, slots=16, num_threads=1, **settings), tell, sample)
        self.workers.append((working, asyncio.create_task(working.run())))
        return working

    def client(self, place: Path, name: str = "ann", token: str = "") -> OutsideClient:
        key = WorkerKey.of_file(place / "key")
        return OutsideClient(self.door.base_url, token or invite(self.folder, name), key)

    async def served(self, working: OutsideWorking) -> None:
        """Until the worker serves the version that is served here and has said so."""
        await self.until(lambda: any(worker.room for worker in self.named()))

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert all(not task.done() for _, task in self.workers), [task for _, task in self.workers]
            await asyncio.sleep(0.01)

    async def ask(self, *, n: int = 2, max_tokens: int = 12, **params: Any) -> Generation:
        self.num_requests += 1
        number = self.num_requests
        seeds = tuple(range(1000 * number, 1000 * number + n))
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        return await self.bridge.generate(GenerationRequest(f"r{number}", PROMPT, sampling, n=n, seeds=seeds))

    async def engine_alone(self, number: int) -> list[Generation]:
        """What the own engine would say to the next so many requests."""
        first = self.num_requests
        found = []
        for _ in range(number):
            with_nobody = self.engine.roster.here()
            rooms = [worker.room for worker in with_nobody]
            for worker in with_nobody:
                worker.room = 0
            found.append(await self.ask())
            for worker, room in zip(with_nobody, rooms, strict=True):
                worker.room = room
        self.num_requests = first
        return found

    def named(self) -> list[OutsideWorker]:
        """Everybody who has come, as the engine knows them."""
        return list(self.engine.roster._workers.values())

    def written(self) -> list[OutsideWorker]:
        return read_roster(self.folder)

    async def close(self) -> None:
        for working, task in self.workers:
            working.stop()
            if not task.done():
                task.cancel()
        await asyncio.gather(*(task for _, task in self.workers), return_exceptions=True)
        await self.door.stop()
        await asyncio.to_thread(self.engine.close)
