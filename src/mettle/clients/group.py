"""The clients of one group's rollouts: identical first turns go out as one request.

Parts: `TokenSampler` (what they sample with), `group_members`, `GroupMember`. Invariant: each member gets a choice of
its own; a member that is cancelled, or that ends without asking, never holds up the others.
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
POSITION_STRIDE, CALL_STRIDE = 1_000_003, 1_000_000_007
"""From a group's seed to those of its members' calls; the engine hashes them."""


class TokenSampler(Protocol):
    """Renders prompts and samples several completions of the same ids; see `mettle.clients.tokens.TokenClient`."""

    def request_fields(self, sampling_args: Mapping[str, Any] | None) -> dict[str, Any]: ...
    def prompt_ids(
        self, prompt: Messages, tools: list[Tool] | None, state: Mapping[str, Any] | None
    ) -> tuple[list[int], bool]: ...
    async def generate(
        self, prompt_ids: Sequence[int], model: str, fields: Mapping[str, Any], n: int, tools: list[Tool] | None
    ) -> list[Response]: ...


def group_members(client: TokenSampler, size: int, *, wait_s: float = GROUP_WAIT_S) -> list[GroupMember]:
    """A client for each of the `size` rollouts of one group, in their order."""
    group = _Group(client, size, wait_s)
    return [GroupMember(group, position) for position in range(size)]


class _Batch:
    """First turns that wait to go out together."""

    def __init__(self, prompt_ids: list[int], model: str, fields: dict[str, Any], tools: list[Tool] | None) -> None:
        self.prompt_ids = prompt_ids
        self.model = model
        self.fields = fields
        self.tools = tools
        self.waiting: list[tuple[int, asyncio.Future[Response]]] = []


class GroupMember(Client):
    """The client of one rollout of a group, at `position` in it.

    With a seed, what it samples depends on the seed, its position, and how many calls it made before: not on when it
    asks, nor on whether its first turn went out with those of others.
    """

    def __init__(self, group: _Group, position: int) -> None:
        self._group = group
        self._position = position
        self._num_calls = 0

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
        """One turn."""
        group = self._group
        prompt_ids, is_first = group.prompt_ids(prompt, tools, state)
        fields = self._seeded(group.client.request_fields(sampling_args))
        if is_first and state is not None and group.enter(self._position):
            return await group.join(self._position, prompt_ids, model, fields, tools)
        return (await group.client.generate(prompt_ids, model, fields, 1, tools))[0]

    def leave(self) -> None:
        """This rollout is done; if it never asked, the others wait for it no longer."""
        if self._group.enter(self._position):
            self._group.flush_if_complete()

    def prompt_ids(
        self, prompt: Messages, tools: list[Tool] | None, state: Mapping[str, Any] | None
    ) -> tuple[list[int], bool]:
        """The ids of `prompt`, and whether no earlier turn was there to extend."""
        return self._group.client.prompt_ids(prompt, tools, state)

    async def close(self) -> None:
        """Nothing of its own to close; the connections belong to the `TokenClient`."""
        return

    def _seeded(self, fields: dict[str, Any]) -> dict[str, Any]:
        call, self._num_calls = self._num_calls, self._num_calls + 1
        if fields.get("seed") is None:
            return fields
        return {**fields, "seed": (int(fields["seed"]) + self._position * POSITION_STRIDE + call * CALL_STRIDE) % 2**63}


class _Group:
    """Identical first turns leave as one request: when every member has asked or finished without asking (`leave`), or
    `wait_s` after the first one asked.
    """

    def __init__(self, client: TokenSampler, size: int, wait_s: float) -> None:
        self.client = client
        self._wait_s = wait_s
        self._num_expected = size
        self._entered: set[int] = set()
        self._batches: dict[tuple[Any, ...], _Batch] = {}
        self._requests: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._first_turn: tuple[Messages, list[Tool] | None, list[int]] | None = None

    def prompt_ids(
        self, prompt: Messages, tools: list[Tool] | None, state: Mapping[str, Any] | None
    ) -> tuple[list[int], bool]:
        """The ids of `prompt`, and whether no earlier turn was there to extend; members that begin alike share them."""
        if state is None or state.get("trajectory"):
            return self.client.prompt_ids(prompt, tools, state)
        if self._first_turn is None or self._first_turn[:2] != (prompt, tools):
            ids, _ = self.client.prompt_ids(prompt, tools, state)
            self._first_turn = ([*prompt], tools, ids)
        return self._first_turn[2], True

    def enter(self, position: int) -> bool:
        """True the first time that a member asks or leaves."""
        if position in self._entered:
            return False
        self._entered.add(position)
        return True

    async def join(
        self, position: int, prompt_ids: list[int], model: str, fields: dict[str, Any], tools: list[Tool] | None
    ) -> Response:
        """A first turn, together with those that are like it but for the seed."""
        loop = asyncio.get_running_loop()
        key = (tuple(prompt_ids), model, repr(sorted((k, v) for k, v in fields.items() if k != "seed")))
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = _Batch(prompt_ids, model, fields, tools)
        future: asyncio.Future[Response] = loop.create_future()
        batch.waiting.append((fields.get("seed", position), future))
        if self._timer is None:
            self._timer = loop.call_later(self._wait_s, self._flush)
        self.flush_if_complete()
        return await future

    def flush_if_complete(self) -> None:
        """Send what waits once nobody is missing."""
        if len(self._entered) >= self._num_expected:
            self._flush()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            batch.waiting = [(seed, future) for seed, future in batch.waiting if not future.done()]
            if batch.waiting:
                request = asyncio.get_running_loop().create_task(self._send(batch))
                self._requests.add(request)
                request.add_done_callback(self._requests.discard)
                for _, future in batch.waiting:
                    future.add_done_callback(partial(_cancel_if_unwanted, batch, request))

    async def _send(self, batch: _Batch) -> None:
        fields = dict(batch.fields)
        if fields.pop("seed", None) is not None:
            fields["seeds"] = [seed for seed, _ in batch.waiting]
        try:
            responses = await self.client.generate(
                batch.prompt_ids, batch.model, fields, len(batch.waiting), batch.tools
            )
        except Exception as error:
            for _, future in batch.waiting:
                if not future.done():
                    future.set_exception(_copy_of(error))
            return
        for (_, future), response in zip(batch.waiting, responses, strict=True):
            if not future.done():
                future.set_result(response)


def _cancel_if_unwanted(batch: _Batch, request: asyncio.Task[None], _: object) -> None:
    if all(future.cancelled() for _, future in batch.waiting):
        request.cancel()


def _copy_of(error: Exception) -> Exception:
    """The same error for another waiter: one instance raised in several tasks would mix their tracebacks."""
    try:
        copy = type(error)(*error.args)
    except Exception:
        copy = ModelError(f"{type(error).__name__}: {error}")
    copy.__cause__ = error
    return copy
