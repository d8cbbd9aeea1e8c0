"""`mettle rl work`: sample for a run that is somewhere else, with one engine, for as long as both are there.

    facts, files ─► join ─► poll ─► sample ─► answer ─► poll ...
                              └─ another version: finish what runs, fetch it, serve it

Every word is signed with a key that this machine keeps. A run that is not reachable is asked again; a session that has
changed (the run's server was started again) is joined anew. Invariant: what is answered was sampled under one version,
the one that it was asked for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp

from mettle.clients.renderer import Renderer
from mettle.errors import MettleError, ProviderError, UserError
from mettle.inference.bodies import GenerateBody
from mettle.inference.bridge import Bridge
from mettle.inference.client import message_of
from mettle.inference.config import InferenceConfig
from mettle.inference.engine.protocol import Choice, GenerationRequest, SamplingEngine
from mettle.inference.launch import open_engine
from mettle.inference.outside.door import PREFIX, open_relay
from mettle.inference.outside.files import (
    ListedFile,
    PieceStore,
    WantedPiece,
    check_listing,
    describe_folder,
    is_piece,
    write_folder,
)
from mettle.inference.outside.relays import NoPiece, PieceAnswer, Relays
from mettle.inference.outside.signatures import WorkerKey
from mettle.web.backoff import Backoff
from mettle.web.server import HttpServer

logger = logging.getLogger(__name__)

IDLE_WAIT_S: Final = 5.0
BUSY_WAIT_S: Final = 0.2
ASK_S: Final = 60.0
GIVE_UP: Final = 40
"""Attempts to reach the run, some minutes, after which the worker ends."""
GIVE_UP_AFTER_WORK: Final = 10
"""The same for a run that was there before: it has most likely ended."""
KEPT_VERSIONS: Final = 2
_OF_WORK: Final = frozenset({"request_id", "version"})
"""What stands beside the request itself."""
Sample = Callable[[GenerationRequest], Awaitable[list[Choice]]]


class RunGone(ProviderError):
    """The run does not answer, or no longer."""


class SessionOver(ProviderError):
    """The door was opened anew: what was agreed with it counts no more."""


@dataclass(slots=True)
class WorkDone:
    """What a worker has done: completions and tokens that were taken, versions served, bytes fetched."""

    completions: int = 0
    num_tokens: int = 0
    versions: int = 0
    fetched_bytes: int = 0
    from_relays: int = 0


@dataclass(frozen=True, slots=True)
class WorkPlace:
    """Where a worker keeps its key and the files of runs, how much it takes, and where it hands pieces on."""

    folder: Path
    slots: int = 64
    num_threads: int | None = None
    relay: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"


class OutsideClient:
    """Speaks to a door. One belongs to one event loop."""

    def __init__(self, url: str, token: str, key: WorkerKey) -> None:
        self._url, self._key = url.rstrip("/"), key
        self._headers = {"Authorization": f"Bearer {token}"}
        self._http: aiohttp.ClientSession | None = None
        self._count = 0
        self.session = ""

    async def read(self, path: str) -> dict[str, Any]:
        """What a GET says. Raises: RunGone, SessionOver, UserError."""
        return self._told(*await self._call("GET", path, b"", {}))

    async def say(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A signed word. Raises: RunGone, SessionOver, UserError; WordRefused where it does not count."""
        data = json.dumps(body).encode()
        self._count += 1
        headers = self._key.headers("POST", PREFIX + path, self.session, self._count, data)
        return self._told(*await self._call("POST", path, data, headers))

    async def piece(self, base: str, piece: WantedPiece, limit_s: float) -> PieceAnswer:
        """What the run ("") or the relay at `base` hands over within `limit_s` seconds.

        Raises: RunGone when it is the run that does not answer.
        """
        url = f"{base or self._url + PREFIX}/pieces/{piece.digest}"
        headers, data = ({} if base else self._headers), bytearray()
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=min(limit_s, 10.0))
        try:
            async with self._session().get(url, headers=headers, timeout=timeout, allow_redirects=False) as response:
                if response.status == 404:
                    return PieceAnswer(fault="absent")
                response.raise_for_status()
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > piece.num_bytes:  # whoever lies has no end to it
                        return PieceAnswer(fault="false")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if not base:
                raise RunGone(f"{url}: {type(error).__name__}: {error}") from error
            return PieceAnswer(fault="silent")
        return PieceAnswer(bytes(data)) if is_piece(data, piece.digest) else PieceAnswer(fault="false")

    async def close(self) -> None:
        """Let go of connections."""
        if self._http is not None:
            await self._http.close()

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession()
        return self._http

    async def _call(self, method: str, path: str, data: bytes, headers: Mapping[str, str]) -> tuple[int, Any]:
        kind = {"Content-Type": "application/json"} if data else {}
        timeout = aiohttp.ClientTimeout(total=ASK_S, sock_connect=10.0)
        url = self._url + PREFIX + path
        try:
            async with self._session().request(
                method, url, data=data or None, headers={**self._headers, **kind, **headers}, timeout=timeout
            ) as response:
                return response.status, await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise RunGone(f"{url}: {type(error).__name__}: {error}") from error

    def _told(self, status: int, body: Any) -> dict[str, Any]:
        if status == 200 and isinstance(body, dict):
            return body
        body = body if isinstance(body, dict) else {}
        code, said = body.get("code"), message_of(body)
        if code == "bad_signature" or (code == "not_admitted" and "is to join" in said):
            raise SessionOver(said)
        if status in (401, 403):
            raise UserError(f"the run at {self._url}: {said}")
        if status in (404, 409):
            raise WordRefused(said)
        raise RunGone(f"{self._url} answered {status}: {said}")


class WordRefused(MettleError):
    """What was said comes too late: the request is somebody else's, the version has gone."""


@dataclass(slots=True)
class _Task:
    request: GenerationRequest
    sampling: asyncio.Task[None]


@dataclass(slots=True)
class OutsideWorking:
    """One worker, from its first word to its last. `sample` may be put in place of what the engine samples (tests)."""

    client: OutsideClient
    place: WorkPlace
    tell: Callable[[str], None] = logger.info
    sample: Sample | None = None
    done: WorkDone = field(default_factory=WorkDone)
    _engine: SamplingEngine | None = None
    _bridge: Bridge | None = None
    _version: int = -1
    _facts: dict[str, Any] = field(default_factory=dict)
    _model: Path = Path()
    _pieces: PieceStore = field(default_factory=PieceStore)
    _relays: Relays = field(init=False)
    _tasks: dict[str, _Task] = field(default_factory=dict)
    _is_stopping: bool = False
    _backoff: Backoff = field(default_factory=lambda: Backoff(first_s=0.2, max_s=10.0))

    def __post_init__(self) -> None:
        self._relays = Relays(self.client.piece, self.place.relay.rstrip("/"), self.tell)

    async def run(self) -> WorkDone:
        """Work until `stop`, the end of the run, or a ban.

        Raises: UserError for a worker that is not wanted; RunGone when the run is not there any more.
        """
        relay = await self._open_relay()
        num_failed = 0
        try:
            while not self._is_stopping:
                try:
                    await self._join()
                    num_failed = 0
                    await self._work()
                except SessionOver as error:
                    self.tell(f"joining again: {error}")
                    await self._drop()
                except RunGone:
                    await self._drop()
                    num_failed += 1
                    if num_failed >= (GIVE_UP if self._version < 0 else GIVE_UP_AFTER_WORK):
                        raise
                    await asyncio.sleep(self._backoff.wait_s(num_failed - 1))
        finally:
            await self._drop()
            if self._engine is not None:
                await asyncio.to_thread(self._engine.close)
            if relay is not None:
                await relay.stop(0.0)
            await self.client.close()
        return self.done

    def stop(self) -> None:
        """Leave the run soon."""
        self._is_stopping = True

    async def _join(self) -> None:
        facts = self._facts = await self.client.read("/facts")
        self.client.session = str(facts["session"])
        named = await self.client.say("/join", {"relay": self.place.relay})
        listed = check_listing(facts["model"])
        self._model = self.place.folder / "model"
        if not self._model.is_dir() or describe_folder(self._model) != listed:
            self.tell(f"fetching the model, {sum(file.num_bytes for file in listed):,} bytes")
            await self._close_engine()
            await self._aside(self._fetch(self._model, listed, facts["relays"]))
        self._pieces.add(self._model, listed)
        self.tell(f"joined {facts['run']} as {named['name']}")

    async def _work(self) -> None:
        while not self._is_stopping:
            room = self.place.slots - sum(task.request.n for task in self._tasks.values())
            told = await self.client.say(
                "/poll",
                {
                    "version": self._version,
                    "room": max(0, room),
                    "working_on": list(self._tasks),
                    "wait_s": BUSY_WAIT_S if self._tasks else IDLE_WAIT_S,
                },
            )
            for request_id in told["lost"]:
                if (task := self._tasks.get(request_id)) is not None:
                    task.sampling.cancel()
            for assigned in told["assigned"]:
                self._begin(assigned)
            self._raise_failures()
            if told["version"] != self._version:
                if self._tasks:
                    await asyncio.wait({task.sampling for task in self._tasks.values()}, timeout=1.0)
                else:
                    await self._aside(self._serve(int(told["version"])))
        await self.client.say("/leave", {})

    async def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that may take long, and stay known to the run meanwhile."""
        doing = asyncio.create_task(work)
        # Three words in each lease, so that one that comes late does not end it.
        wait_s = min(IDLE_WAIT_S, float(self._facts["lease_s"]) / 3)
        try:
            while not (await asyncio.wait({doing}, timeout=wait_s))[0]:
                await self.client.say("/poll", {"version": self._version, "room": 0})
        finally:
            if not doing.done():
                doing.cancel()
                await asyncio.gather(doing, return_exceptions=True)
        await doing

    def _begin(self, assigned: Mapping[str, Any]) -> None:
        body = GenerateBody.model_validate({name: value for name, value in assigned.items() if name not in _OF_WORK})
        request = GenerationRequest(
            request_id=str(assigned["request_id"]),
            prompt_ids=body.prompt_ids,
            params=body.params(body.max_tokens),
            n=body.n or 1,
            seeds=tuple(body.seeds or ()),
        )
        self._tasks[request.request_id] = _Task(request, asyncio.create_task(self._answer(request)))

    async def _answer(self, request: GenerationRequest) -> None:
        choices = await (self.sample or self.sampled)(request)
        told = [
            {"token_ids": c.token_ids, "logprobs": c.logprobs, "finish_reason": c.finish_reason, "stop": c.stop}
            for c in choices
        ]
        try:
            await self.client.say("/answer", {"request_id": request.request_id, "choices": told})
        except WordRefused as error:
            self.tell(f"an answer was not taken: {error}")
        else:
            self.done.completions += len(choices)
            self.done.num_tokens += sum(len(choice.token_ids) for choice in choices)
        finally:
            self._tasks.pop(request.request_id, None)

    async def sampled(self, request: GenerationRequest) -> list[Choice]:
        """What the worker's own engine samples."""
        assert self._bridge is not None, "a version is served"
        return list((await self._bridge.generate(request)).choices)

    def _raise_failures(self) -> None:
        for request_id, task in list(self._tasks.items()):
            if task.sampling.done():
                del self._tasks[request_id]
                if not task.sampling.cancelled() and (error := task.sampling.exception()) is not None:
                    raise error

    async def _serve(self, version: int) -> None:
        try:
            told = await self.client.read(f"/versions/{version}")
            weights = None
            if told["files"] is not None:
                weights = self.place.folder / "weights" / f"v{version}"
                listed = check_listing(told["files"])
                if not weights.is_dir() or describe_folder(weights) != listed:
                    await self._fetch(weights, listed, told["relays"])
                self._pieces.add(weights, listed)
        except (WordRefused, NoPiece):  # the run has gone on meanwhile; the next poll says to what
            return
        if weights is None:
            await self._close_engine()
        if self._engine is None:
            self._engine = await asyncio.to_thread(self._open, weights, version)
            self._bridge = Bridge(self._engine)
        else:
            assert weights is not None, "the engine was closed"
            await asyncio.to_thread(self._engine.update_weights, weights, version)
        self._version = version
        self.done.versions += 1
        self.tell(f"serving v{version}")
        self._forget_old(version)

    def _open(self, weights: Path | None, version: int) -> SamplingEngine:
        renderer = Renderer.from_directory(self._model)
        config = InferenceConfig(
            model=self._model,
            weights=weights,
            version=version,
            dtype=self._facts["dtype"],
            max_model_len=int(self._facts["max_model_len"]),
            max_slots=self.place.slots,
            num_threads=self.place.num_threads,
            device=self.place.device,
        )
        return open_engine(config, eos_token_ids=renderer.stop_token_ids, decode_text=renderer.visible_text)

    async def _close_engine(self) -> None:
        engine, self._engine, self._bridge, self._version = self._engine, None, None, -1
        if engine is not None:
            await asyncio.to_thread(engine.close)

    def _forget_old(self, version: int) -> None:
        for folder in (self.place.folder / "weights").glob("v*"):
            number = folder.name[1:]
            if number.isdigit() and int(number) not in range(version - KEPT_VERSIONS + 1, version + 1):
                shutil.rmtree(folder, ignore_errors=True)

    async def _fetch(self, folder: Path, listed: list[ListedFile], relays: Iterable[object]) -> None:
        self._relays.know(relays)
        fetched = await write_folder(folder, listed, self._relays.pieces, self._pieces)
        self.done.fetched_bytes += fetched.num_bytes
        self.done.from_relays = self._relays.num_pieces

    async def _drop(self) -> None:
        """Forget what was asked: the run gives it to others."""
        tasks = [task.sampling for task in self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _open_relay(self) -> HttpServer | None:
        if not self.place.relay:
            return None
        server = await open_relay(self._pieces, self.place.relay)
        self.tell(f"handing weights on at {self.place.relay}")
        return server
