"""Another inference server of ours as an engine: its `/v1/generate` for requests, its admin routes for the rest.

What the far engine decides (tokens, versions, ends) is passed on as it comes; nothing is decided here. A request that
wants tokens one by one is a stream; any other is one answer, which an abort brings home early. The server is asked for
its status now and then, and counts as gone when it is silent twice in a row. Weights are handed over as a path: both
sides read the same folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import numpy as np
from numpy.typing import NDArray

from mettle.errors import MettleError, ProviderError, ServiceError, UserError
from mettle.inference.client import ServerClient, message_of
from mettle.inference.conversations import Conversations
from mettle.inference.engine.limits import Limits, check_request
from mettle.inference.engine.protocol import (
    Choice,
    EngineBusy,
    EngineLost,
    EngineStatus,
    EngineStopped,
    Generation,
    GenerationRequest,
    PauseMode,
    RequestRefused,
    SamplingEngine,
    TokenEvent,
    TokenListener,
    TokenLogprob,
    WeightUpdate,
)
from mettle.inference.engine.sequences import RunningRequest
from mettle.processes.child import explain_exit
from mettle.processes.managed import ManagedProcess
from mettle.records.experts import read_experts

POLL_S: Final = 0.5
MAX_SILENCES: Final = 2
ABORT_WAIT_S: Final = 10.0
CONNECT_S: Final = 10.0
END_S: Final = 5.0
_NO_LOGPROB: Final = -9999.0


class RemoteEngine:
    """The engine of the server at `base_url`, which ends in /v1. Made by asking it where it stands.

    `process` is that server, where it was started for this engine: it ends with it.

    Raises: UserError when the server refuses the keys; ProviderError when nothing answers.
    """

    def __init__(
        self,
        base_url: str,
        *,
        admin_key: str,
        api_key: str = "",
        process: ManagedProcess | None = None,
        on_death: Callable[[MettleError], None] | None = None,
    ) -> None:
        self._process = process
        self.base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key or admin_key}"} if api_key or admin_key else {}
        self._client = ServerClient(lambda: self.base_url, admin_key)
        self._session: aiohttp.ClientSession | None = None
        self._on_death = on_death
        self._is_alive = True
        self._is_closing = False
        self._calls = Conversations("remote-engine", self._converse)
        try:
            self._status = self._calls.call(self._client.status())
        except BaseException as error:
            self._calls.close(self._let_go)
            if "answered 401" in str(error) or "answered 403" in str(error):
                raise UserError(f"the server at {base_url} does not take the admin key: {error}") from error
            raise
        self._limits = Limits(self._status.max_slots, self._status.max_model_len)
        self._calls.spawn(self._watch())

    @property
    def name(self) -> str:
        """What it is called among several: a server that was started here by its number, for its port changes with
        every start; any other by its address."""
        return self._process.spec.name if self._process is not None else urlsplit(self.base_url).netloc

    def submit(self, request: GenerationRequest, listener: TokenListener) -> None:
        """Take a request. A queue that is full over there is told to the listener, as EngineBusy."""
        check_request(request, self._limits, self._status.vocab_size, keeps_grammars=True)
        if not self._is_alive or self._exit_code() is not None:
            raise EngineStopped(self._lost())
        self._calls.take(request, listener)

    def abort(self, request_id: str) -> None:
        """End a request, over there too."""
        self._calls.abort(request_id)

    def update_weights(self, folder: Path, version: int) -> WeightUpdate:
        """Have the folder served; the other side proves it."""
        update: WeightUpdate = self._ask(lambda: self._client.update_weights(folder.resolve(), version))
        self._status = dataclasses.replace(self._status, version=version)
        return update

    def load_adapter(self, name: str, folder: Path, version: int | None = None) -> WeightUpdate:
        """Have an adapter served; the other side reads and proves it."""
        path = folder.resolve()
        if version is None:
            update: WeightUpdate = self._ask(lambda: self._client.load_adapter(name, path))
        else:
            update = self._ask(lambda: self._client.update_weights(path, version, name))
        self._status = self._ask(self._client.status)
        return update

    def unload_adapter(self, name: str) -> None:
        """Have no more requests taken for it."""
        self._ask(lambda: self._client.unload_adapter(name))
        self._status = self._ask(self._client.status)

    def pause(self, mode: PauseMode) -> None:
        """Stop sampling over there."""
        self._ask(lambda: self._client.pause(mode))
        self._status = dataclasses.replace(self._status, is_paused=True)

    def resume(self) -> None:
        """Go on over there."""
        self._ask(self._client.resume)
        self._status = dataclasses.replace(self._status, is_paused=False)

    def status(self) -> EngineStatus:
        """What the server said last, with the requests that went through here counted as of now."""
        known, ours = self._status, self._calls.num_outstanding
        waiting = max(known.num_waiting, ours - known.num_running)
        is_alive = self._is_alive and not self._is_closing and self._exit_code() is None
        return dataclasses.replace(known, num_waiting=waiting, is_alive=is_alive)

    def close(self) -> None:
        """Abort what is left. A server that was started for this engine ends, any other goes on."""
        self._is_closing = True
        self._calls.close(self._let_go)
        if self._process is not None:
            self._process.end(grace_s=END_S)

    def _ask(self, what: Callable[[], Any]) -> Any:
        try:
            return self._calls.call(what())
        except ProviderError as error:
            raise EngineStopped(f"{self._lost()}: {error}") from error

    def _exit_code(self) -> int | None:
        return None if self._process is None else self._process.exit_code()

    def _lost(self) -> str:
        code = self._exit_code()
        if self._process is not None and code is not None:
            return explain_exit(self._process.spec.name, code, self._process.last_line())
        return f"the engine at {self.base_url} does not answer"

    async def _let_go(self) -> None:
        await self._client.close()
        if self._session is not None:
            await self._session.close()

    async def _watch(self) -> None:
        num_silent = 0
        while self._is_alive:
            await asyncio.sleep(POLL_S)
            try:
                self._status = await self._client.status()
                num_silent = 0
                self._is_alive = self._status.is_alive
            except ProviderError:
                num_silent += 1
                self._is_alive = num_silent < MAX_SILENCES and self._exit_code() is None
        error = EngineLost(self._lost())
        self._calls.end(error)
        if self._on_death is not None:
            self._on_death(error)

    async def _converse(self, running: RunningRequest) -> None:
        body = wire_request(running.request)
        try:
            if running.request.has_token_events:
                await self._stream(running, body)
            else:
                await self._whole(running, body)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise EngineLost(f"{self._lost()}: {type(error).__name__}: {error}") from error

    async def _whole(self, running: RunningRequest, body: dict[str, Any]) -> None:
        alias = body["request_id"] = f"remote-{uuid.uuid4().hex}"
        asking = asyncio.create_task(self._post("/generate", body))
        try:
            answer = await asyncio.shield(asking)
        except asyncio.CancelledError:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError, MettleError):
                async with asyncio.timeout(ABORT_WAIT_S):
                    await self._post("/generate/abort", {"request_id": alias})
                    self._settle(running, await asyncio.shield(asking))
            asking.cancel()  # where it has not come home; the server ends a request whose client goes away
            raise
        self._settle(running, answer)

    async def _stream(self, running: RunningRequest, body: dict[str, Any]) -> None:
        # A token that never comes is the far engine's matter: a paused one says nothing for as long as it is paused.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with self._http().post(f"{self.base_url}/generate", json=body, timeout=timeout) as response:
            if response.status != 200:
                raise refusal(response.status, await _json(response))
            async for data in server_events(response):
                self._hear(running, data)
        if not running.is_settled:
            raise EngineLost(f"{self._lost()}: the stream ended early")

    def _hear(self, running: RunningRequest, data: str) -> None:
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ServiceError(message_of(event))
        if "choices" in event:
            self._settle(running, event)
            return
        told = TokenEvent(
            event["choice"], event["token_id"], event["logprob"], event["version"],
            read_alternatives(event["top_logprobs"]), event["finish_reason"], event["stop"],
        )  # fmt: skip
        _note(running, told)
        running.listener.on_token(told)

    def _settle(self, running: RunningRequest, answer: Mapping[str, Any]) -> None:
        if not running.is_settled:
            running.is_settled = True
            request = running.request
            choices = tuple(read_choice(choice) for choice in answer["choices"])
            top = answer.get("prompt_top_logprobs")
            tops = None if top is None else [read_alternatives(found) for found in top]
            running.listener.on_finish(
                Generation(request.request_id, answer["prompt_tokens"], choices, answer["prompt_logprobs"], tops)
            )

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with self._http().post(self.base_url + path, json=body, timeout=timeout) as response:
            answer = await _json(response)
            if response.status != 200:
                raise refusal(response.status, answer)
            return answer

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector)
        return self._session


def wire_request(request: GenerationRequest) -> dict[str, Any]:
    """The body of `/v1/generate` that asks for exactly this."""
    body: dict[str, Any] = dataclasses.asdict(request.params)
    constraint = request.params.constraint
    del body["constraint"]
    body["structured_outputs"] = constraint.wire() if constraint is not None else None
    body["logit_bias"] = {str(token_id): bias for token_id, bias in request.params.logit_bias} or None
    body |= {
        "prompt_ids": list(request.prompt_ids),
        "n": request.n,
        "prompt_logprobs": request.prompt_logprobs,
        "top_logprobs": request.top_logprobs,
        "stream": request.has_token_events,
        "seeds": list(request.seeds) or None,
    }
    if request.adapter:
        pinned = "" if request.adapter_version is None else f"@v{request.adapter_version}"
        body["model"] = request.adapter + pinned
    return body


def read_choice(found: Mapping[str, Any]) -> Choice:
    """A choice of an answer of `/v1/generate`."""
    top = [read_alternatives(alternatives) for alternatives in found.get("top_logprobs", ())]
    return Choice(
        found["index"], found["token_ids"], found["logprobs"], found["versions"], top,
        found["finish_reason"], found["stop"], _experts(found), str(found.get("replica") or ""),
    )  # fmt: skip


def _experts(found: Mapping[str, Any]) -> list[NDArray[np.int16]]:
    numbers = np.frombuffer(read_experts(found.get("experts"), len(found["token_ids"])), np.int16)
    return list(numbers.reshape(len(found["token_ids"]), -1)) if len(numbers) else []


def read_alternatives(found: Sequence[Sequence[Any]]) -> list[TokenLogprob]:
    """Pairs of an id and a logprob."""
    return [TokenLogprob(token, float("-inf") if value <= _NO_LOGPROB else value) for token, value in found]


def refusal(status: int, body: Mapping[str, Any]) -> MettleError:
    """What a status that is not 200 means, in the words of the seam."""
    error = body.get("error")
    error = error if isinstance(error, dict) else {}
    message = message_of(body)
    match status:
        case 400 | 404:
            return RequestRefused(message, str(error.get("param") or "request"), error.get("code"))
        case 429:
            return EngineBusy(message)
        case 503:
            return EngineStopped(message)
    return ServiceError(f"status {status}: {message}")


async def server_events(response: aiohttp.ClientResponse) -> AsyncGenerator[str]:
    """The data of server-sent events, however long one is."""
    rest = b""
    async for piece in response.content.iter_any():
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            yield "\n".join(line[5:].strip() for line in event.decode().split("\n") if line.startswith("data:"))


async def _json(response: aiohttp.ClientResponse) -> dict[str, Any]:
    body = await response.json(content_type=None)
    return body if isinstance(body, dict) else {"message": body}


def _note(running: RunningRequest, event: TokenEvent) -> None:
    """Keep what was told, for a request that is aborted before its answer comes."""
    choice = running.choices[event.choice]
    if event.token_id is not None:
        choice.token_ids.append(event.token_id)
        choice.logprobs.append(event.logprob)
        choice.versions.append(event.version)
        if running.request.top_logprobs:
            choice.top_logprobs.append(event.top_logprobs)
    if event.finish_reason is not None:
        running.end_choice(choice, event.finish_reason, event.stop)


_KEEPS_THE_PROTOCOL: type[SamplingEngine] = RemoteEngine
