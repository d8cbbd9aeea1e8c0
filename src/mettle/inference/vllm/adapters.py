"""LoRA adapters in vLLM: each version is a model name of its own there, proven before anything is sampled under it.

Parts: `AdapterFolder` (what a folder says of itself), `VllmAdapters` (loading, choosing, unloading). vLLM keeps a
request on the adapter that it began with, so a version that was replaced is unloaded when its last request has ended.
Invariant: a version that did not reproduce its canary is known to nobody.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from mettle.errors import MettleError, ServiceError, StorageError
from mettle.inference.engine.protocol import (
    AdapterStatus,
    EngineLost,
    GenerationRequest,
    RequestRefused,
    WeightsRejected,
)
from mettle.inference.engine.served_adapters import ServedAdapters
from mettle.inference.vllm.launch import SERVED_NAME
from mettle.inference.vllm.wire import VllmWire
from mettle.records.versions import CanaryCheck
from mettle.storage.weights import ADAPTER_CONFIG, Canary, base_digest_of, model_digest, read_canary, read_version

Prove = Callable[[Canary | None, int, str], Awaitable[CanaryCheck | None]]
"""Compares a canary with what vLLM says under a model name. Raises: WeightsRejected."""


class AdapterFolder(NamedTuple):
    """A PEFT folder; `version` and `canary` are those of its publication, if it is one."""

    rank: int
    version: int | None
    canary: Canary | None


class VllmModel(NamedTuple):
    """A name that vLLM serves, and the version that its tokens have. Those of the base change under what runs."""

    name: str
    version: int
    is_base: bool


class VllmAdapters:
    """The adapters of one server: those that requests name, and the one that is the run's policy, if it trains one."""

    def __init__(self, wire: VllmWire, base: Path, served: ServedAdapters[str], prove: Prove) -> None:
        self._wire, self._base, self._served, self._prove = wire, base, served, prove
        self._policy: VllmModel | None = None
        self._uses: Counter[str] = Counter()
        self._retired: set[str] = set()

    @property
    def is_policy(self) -> bool:
        """Whether requests that name no adapter are sampled under one."""
        return self._policy is not None

    async def take_policy(self, folder: Path, version: int) -> CanaryCheck | None:
        """Have requests that name no adapter sampled under the one in `folder`, from the next request on.

        Raises: WeightsRejected; then what was served is served still.
        """
        found = read_adapter_folder(folder, version, self._base)
        name = f"{SERVED_NAME}@@v{version}"  # no adapter that has a name has two of them
        check = await self._load(name, folder, version, found.canary)
        before, self._policy = self._policy, VllmModel(name, version, is_base=False)
        if before is not None and before.name != name:
            await self._retire(before.name)
        return check

    async def drop_policy(self) -> None:
        """Have requests that name no adapter sampled by the base again."""
        before, self._policy = self._policy, None
        if before is not None:
            await self._retire(before.name)

    async def load(self, name: str, folder: Path, version: int | None) -> tuple[int, CanaryCheck | None]:
        """Serve the adapter in `folder` as the newest version of `name`; the number of that version, and its proof.

        Raises: WeightsRejected.
        """
        found = read_adapter_folder(folder, version, self._base)
        number = self._served.next_version(name) if found.version is None else found.version
        self._served.check_room(name)
        check = await self._load(f"{name}@v{number}", folder, number, found.canary)
        before = self._served.units()
        self._served.put(name, folder, found.rank, number, f"{name}@v{number}")
        await self._retire(*(f"{old}@v{dropped}" for old, dropped in before - self._served.units()))
        return number, check

    async def unload(self, name: str) -> None:
        """Take no more requests for an adapter; those under way end under it."""
        models = [f"{name}@v{number}" for found, number in self._served.units() if found == name]
        self._served.remove(name)
        await self._retire(*models)

    def statuses(self) -> tuple[AdapterStatus, ...]:
        """Those that requests may name."""
        return self._served.statuses()

    def check(self, request: GenerationRequest) -> None:
        """Raises: RequestRefused for an adapter that is not served."""
        self._served.check(request)

    @asynccontextmanager
    async def chosen(self, request: GenerationRequest, base_version: int) -> AsyncIterator[VllmModel]:
        """The model that a request, or a part of it, is sent to; it stays loaded until the block is left."""
        chosen = self._served.choose(request)
        if chosen is not None:
            model = VllmModel(chosen.weights, chosen.unit[1], is_base=False)
        else:
            model = self._policy or VllmModel(SERVED_NAME, base_version, is_base=True)
        self._uses[model.name] += 1
        try:
            yield model
        finally:
            self._uses[model.name] -= 1
            with contextlib.suppress(MettleError):  # a server that is gone serves nothing anyway
                await self._forget_unused()

    async def _load(self, model: str, folder: Path, number: int, canary: Canary | None) -> CanaryCheck | None:
        try:
            await self._wire.load_adapter(model, folder)
            self._retired.discard(model)
            return await self._prove(canary, number, model)
        except WeightsRejected:
            await self._wire.unload_adapter(model)
            raise
        except EngineLost:
            raise
        except (RequestRefused, ServiceError) as error:
            hint = "; inference.vllm.lora_rank says the largest rank that is served, and is unset unless a run sets it"
            raise WeightsRejected(f"the adapter in {folder} is not served: {error}{hint}") from error

    async def _retire(self, *models: str) -> None:
        self._retired.update(models)
        await self._forget_unused()

    async def _forget_unused(self) -> None:
        for model in [model for model in self._retired if not self._uses[model]]:
            self._retired.discard(model)
            del self._uses[model]
            await self._wire.unload_adapter(model)


def read_adapter_folder(folder: Path, version: int | None, base: Path) -> AdapterFolder:
    """What a PEFT folder says. With a `version` it must be a publication of that.

    Raises: WeightsRejected when it is no adapter, or one of another base or version.
    """
    try:
        rank = int(json.loads((folder / ADAPTER_CONFIG).read_text())["r"])
        if not (folder / "manifest.json").exists():
            if version is not None:
                raise WeightsRejected(f"{folder} is no published version, and v{version} was asked for")
            return AdapterFolder(rank, None, None)
        published = read_version(folder)
        if version not in (None, published.version):
            raise WeightsRejected(f"{folder} holds version {published.version}, not {version}")
        if base_digest_of(folder) != model_digest(base):
            raise WeightsRejected(f"{folder} holds an adapter of another base than {base}")
        return AdapterFolder(rank, published.version, read_canary(folder))
    except (StorageError, OSError, KeyError, ValueError, TypeError) as error:
        raise WeightsRejected(f"no adapter in {folder}: {type(error).__name__}: {error}") from error
