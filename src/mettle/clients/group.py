"""The client of one group's rollouts: identical first turns go out as one request.

Parts: `TokenSampler` (what it samples with), `GroupTokenClient`. Invariant: each member gets a choice of its own; a
member that is cancelled, or that ends without asking, never holds up the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from mettle.clients.base import Client
from mettle.clients.errors import ModelError
from mettle.records.messages import Messages, Response, Tool

GROUP_WAIT_S = 0.02


class TokenSampler(Protocol):
    """Renders prompts and samples several completions of the same ids; see `mettle.clients.tokens.TokenClient`."""

    def request_fields(self, sampling_args: Mapping[str, Any] | None) -> dict[str, Any]: ...
    def prompt_ids(
        self, prompt: Messages, tools: list[Tool] | None, state: Mapping[str, Any] | None
    ) -> tuple[list[int], bool]: ...
    async def generate(
        self, prompt_ids: Sequence[int], model: str, fields: Mapping[str, Any], n: int, tools: list[Tool] | None
    ) -> list[Response]: ...


class _Batch:
    """First turns that wait to go out together."""

    def __init__(self, prompt_ids: list[int], model: str, fields: dict[str, Any], tools: list[Tool] | None) -> None:
        self.prompt_ids = prompt_ids
        self.model = model
        self.fields = fields
        self.tools = tools
        self.waiting: list[asyncio.Future[Response]] = []


class GroupTokenClient(Client):
    """The client of one group's rollouts. Identical first turns leave as one request with n.

    They leave when every member has asked or finished without asking (`leave`), or `wait_s` after the first one asked.
    With a seed, each request of the group draws from another stream: members asking separately would sample the same.
    """

    def __init__(self, client: TokenSampler, size: int, *, wait_s: float = GROUP_WAIT_S) -> None:
        self._client = client
        self._wait_s = wait_s
        self._num_expected = size
        self._members: set[str] = set()
        self._batches: dict[tuple[Any, ...], _Batch] = {}
        self._num_drawn = 0
        self._requests: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._first_turn: tuple[Messages, list[Tool] | None, list[int]] | None = None

    async def get_response(
        self,
        prompt: Messages,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        tools: list[Tool] | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> Response:
        """One turn of one member."""
        prompt_ids, is_first = self._prompt_ids(prompt, tools, state)
        fields = self._client.request_fields(sampling_args)
        if is_first and state is not None and self._is_new(state):
            return await self._join(prompt_ids, model, fields, tools)
        fields = self._seeded(fields, 1)
        return (await self._client.generate(prompt_ids, model, fields, 1, tools))[0]

    def leave(self, state: Mapping[str, Any]) -> None:
        """A member is done; if it never asked, the others wait for it no longer."""
        if self._is_new(state):
            self._flush_if_complete()

    def prompt_ids(
        self, prompt: Messages, tools: list[Tool] | None, state: Mapping[str, Any] | None
    ) -> tuple[list[int], bool]:
        """The ids of `prompt`, and whether no earlier turn was there to extend."""
        return self._client.prompt_ids(prompt, tools, state)

    async def close(self) -> None:
        """Nothing of its own to close; the connections belong to the `TokenClient`."""
        return

    def _prompt_ids(
        self, prompt: Messages, tools: list[Tool] | None, state: Mapping[str, Any] | None
    ) -> tuple[list[int], bool]:
        """The ids of `prompt`; members that begin alike share one rendering."""
        if state is None or state.get("trajectory"):
            return self._client.prompt_ids(prompt, tools, state)
        if self._first_turn is None or self._first_turn[:2] != (prompt, tools):
            ids, _ = self._client.prompt_ids(prompt, tools, state)
            self._first_turn = ([*prompt], tools, ids)
        return self._first_turn[2], True

    def _is_new(self, state: Mapping[str, Any]) -> bool:
        member = str(state.get("trajectory_id") or id(state))
        if member in self._members:
            return False
        self._members.add(member)
        return True

    async def _join(
        self, prompt_ids: list[int], model: str, fields: dict[str, Any], tools: list[Tool] | None
    ) -> Response:
        loop = asyncio.get_running_loop()
        key = (tuple(prompt_ids), model, repr(sorted(fields.items())))
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = _Batch(prompt_ids, model, fields, tools)
        future: asyncio.Future[Response] = loop.create_future()
        batch.waiting.append(future)
        if self._timer is None:
            self._timer = loop.call_later(self._wait_s, self._flush)
        self._flush_if_complete()
        return await future

    def _flush_if_complete(self) -> None:
        if len(self._members) >= self._num_expected:
            self._flush()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            batch.waiting = [future for future in batch.waiting if not future.done()]
            if batch.waiting:
                batch.fields = self._seeded(batch.fields, len(batch.waiting))
                request = asyncio.get_running_loop().create_task(self._send(batch))
                self._requests.add(request)
                request.add_done_callback(self._requests.discard)
                for future in batch.waiting:
                    future.add_done_callback(partial(_cancel_if_unwanted, batch, request))

    async def _send(self, batch: _Batch) -> None:
        try:
            responses = await self._client.generate(
                batch.prompt_ids, batch.model, batch.fields, len(batch.waiting), batch.tools
            )
        except Exception as error:
            for future in batch.waiting:
                if not future.done():
                    future.set_exception(_copy_of(error))
            return
        for future, response in zip(batch.waiting, responses, strict=True):
            if not future.done():
                future.set_result(response)

    def _seeded(self, fields: dict[str, Any], num_choices: int) -> dict[str, Any]:
        offset, self._num_drawn = self._num_drawn, self._num_drawn + num_choices
        seed = fields.get("seed")
        return fields if seed is None or offset == 0 else {**fields, "seed": (int(seed) + offset * 1_000_003) % 2**63}


def _cancel_if_unwanted(batch: _Batch, request: asyncio.Task[None], _: object) -> None:
    if all(future.cancelled() for future in batch.waiting):
        request.cancel()


def _copy_of(error: Exception) -> Exception:
    """The same error for another waiter: one instance raised in several tasks would mix their tracebacks."""
    try:
        copy = type(error)(*error.args)
    except Exception:
        copy = ModelError(f"{type(error).__name__}: {error}")
    copy.__cause__ = error
    return copy
