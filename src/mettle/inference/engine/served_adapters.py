"""Which adapters an engine serves, each with its newest versions, and which of them a request chose. No torch here.

A version that is put in place of an older one is the newest from the next token on, also for requests under way; a
request that pinned a version keeps it, even when nobody else can ask for it any more. Invariant: changed by one thread,
the engine's; what other threads read is replaced as a whole and never changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar

from mettle.inference.engine.protocol import AdapterStatus, GenerationRequest, RequestRefused, WeightsRejected

Weights = TypeVar("Weights")


class ServedAdapter(Generic[Weights]):
    """One adapter; `versions` by number, the newest last."""

    def __init__(self, name: str, path: Path, rank: int) -> None:
        self.name, self.path, self.rank = name, path, rank
        self.versions: dict[int, Weights] = {}

    @property
    def newest(self) -> int:
        """The version that requests get which ask for none."""
        return next(reversed(self.versions))


class ChosenAdapter(Generic[Weights]):
    """The adapter of one request: always the newest version of it, or the one that was pinned."""

    def __init__(self, served: ServedAdapter[Weights], version: int | None) -> None:
        self._served = served
        self._version = version
        self._pinned = None if version is None else served.versions[version]

    @property
    def unit(self) -> tuple[str, int]:
        """Name and version as of now."""
        return self._served.name, self._served.newest if self._version is None else self._version

    @property
    def weights(self) -> Weights:
        """The weights of that version."""
        return self._served.versions[self._served.newest] if self._pinned is None else self._pinned


class ServedAdapters(Generic[Weights]):
    """All of them: at most `max_adapters`, with `max_versions` each."""

    def __init__(self, max_adapters: int = 16, max_versions: int = 4) -> None:
        self._max_adapters, self._max_versions = max_adapters, max_versions
        self._served: dict[str, ServedAdapter[Weights]] = {}
        self._next_versions: dict[str, int] = {}

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request for an adapter, or a version of one, that is not served.

        Raises: RequestRefused.
        """
        if not request.adapter:
            return
        served = self._served.get(request.adapter)
        if served is None:
            raise RequestRefused(f"adapter {request.adapter!r} is not served", "model", "model_not_found")
        if request.adapter_version is not None and request.adapter_version not in served.versions:
            there = ", ".join(f"v{number}" for number in served.versions)
            message = f"version v{request.adapter_version} of {request.adapter!r} is not served; {there} are"
            raise RequestRefused(message, "model", "model_not_found")

    def choose(self, request: GenerationRequest) -> ChosenAdapter[Weights] | None:
        """What a request asks for; None for the base.

        Raises: RequestRefused, as `check` does.
        """
        self.check(request)
        return ChosenAdapter(self._served[request.adapter], request.adapter_version) if request.adapter else None

    def next_version(self, name: str) -> int:
        """A number for a version that has none: never one that the name had before."""
        return self._next_versions.get(name, 0)

    def check_room(self, name: str) -> None:
        """Refuse a further adapter when there are as many as there may be.

        Raises: WeightsRejected.
        """
        if name not in self._served and len(self._served) >= self._max_adapters:
            number = len(self._served)
            raise WeightsRejected(
                f"{number} adapters are served and no more are taken; unload one, or raise max_adapters"
            )

    def put(self, name: str, path: Path, rank: int, version: int, weights: Weights) -> None:
        """Serve a version, as the newest of its adapter.

        Raises: WeightsRejected.
        """
        self.check_room(name)
        served = self._served.get(name) or ServedAdapter(name, path, rank)
        versions = {number: kept for number, kept in served.versions.items() if number != version}
        kept = dict(list(versions.items())[max(0, len(versions) + 1 - self._max_versions) :])
        served.versions = {**kept, version: weights}
        served.path, served.rank = path, rank
        self._served = {**self._served, name: served}
        self._next_versions[name] = max(self.next_version(name), version + 1)

    def remove(self, name: str) -> None:
        """Take no more requests for an adapter; those under way end with what they have."""
        self._served = {other: served for other, served in self._served.items() if other != name}

    def statuses(self) -> tuple[AdapterStatus, ...]:
        """What is served."""
        return tuple(
            AdapterStatus(served.name, str(served.path), served.rank, tuple(served.versions))
            for served in self._served.values()
        )

    def units(self) -> set[tuple[str, int]]:
        """Every name and version that a request may ask for."""
        return {(name, version) for name, served in self._served.items() for version in served.versions}
