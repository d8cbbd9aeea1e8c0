"""From the engine's thread to the event loop: one wake-up a step, however many requests have news.

A handler that is cancelled, because its client went away, aborts its request. Invariant: neither side ever blocks here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from mettle.errors import MettleError
from mettle.inference.engine.protocol import Generation, GenerationRequest, SamplingEngine, TokenEvent, TokenListener


class Bridge:
    """Awaitable requests to an engine. Made and used inside a running event loop."""

    def __init__(self, engine: SamplingEngine) -> None:
        self.engine = engine
        self._loop = asyncio.get_running_loop()
        self._news: deque[Callable[[], None]] = deque()
        self._is_waking = False

    async def generate(self, request: GenerationRequest) -> Generation:
        """All of a request at once.

        Raises: what `SamplingEngine.submit` raises, and ServiceError when the engine fails under the request.
        """
        listener = _WholeAnswer(self)
        await self._submit(request, listener)
        try:
            return await listener.answer
        except asyncio.CancelledError:
            self.engine.abort(request.request_id)
            raise

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent | Generation]:
        """A request token by token, and at last the whole of it. The request must have token events."""
        listener = _TokenStream(self)
        await self._submit(request, listener)
        has_ended = False
        try:
            while not has_ended:
                item = await listener.items.get()
                if isinstance(item, MettleError):
                    raise item
                has_ended = isinstance(item, Generation)
                yield item
        finally:
            if not has_ended:
                self.engine.abort(request.request_id)

    async def _submit(self, request: GenerationRequest, listener: TokenListener) -> None:
        if request.params.constraint is None:
            self.engine.submit(request, listener)
            return
        # A grammar is compiled on the way, which may take some tenths of a second.
        submitting = asyncio.ensure_future(asyncio.to_thread(self.engine.submit, request, listener))
        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(lambda task: self._forget(task, request.request_id))
            raise

    def _forget(self, submitted: asyncio.Future[None], request_id: str) -> None:
        if submitted.exception() is None:
            self.engine.abort(request_id)

    def post(self, deliver: Callable[[], None]) -> None:
        """Run something in the event loop soon; called from the engine's thread."""
        self._news.append(deliver)
        if not self._is_waking:
            self._is_waking = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed, so nobody waits for the news
                self._news.clear()

    def _deliver(self) -> None:
        # The flag falls first: news that comes during the loop is either seen by it or wakes the next one.
        self._is_waking = False
        while self._news:
            self._news.popleft()()


class _WholeAnswer:
    """Keeps a future for the generation."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self.answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()

    def on_token(self, event: TokenEvent) -> None:
        return

    def on_finish(self, generation: Generation) -> None:
        self._bridge.post(lambda: self._settle(generation))

    def on_failure(self, error: MettleError) -> None:
        self._bridge.post(lambda: self._settle(error))

    def _settle(self, outcome: Generation | MettleError) -> None:
        if self.answer.done():
            return  # cancelled: nobody waits
        if isinstance(outcome, MettleError):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)


class _TokenStream:
    """Keeps a queue of what happened."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self.items: asyncio.Queue[TokenEvent | Generation | MettleError] = asyncio.Queue()

    def on_token(self, event: TokenEvent) -> None:
        self._put(event)

    def on_finish(self, generation: Generation) -> None:
        self._put(generation)

    def on_failure(self, error: MettleError) -> None:
        self._put(error)

    def _put(self, item: TokenEvent | Generation | MettleError) -> None:
        self._bridge.post(lambda: self.items.put_nowait(item))
