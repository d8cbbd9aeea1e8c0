"""An engine from memory: no model, no torch. For tests and demos of everything that talks to an engine.

It says what `answer` says, one request at a time in a thread of its own, with log-probability -0.5 a token. `hold`
keeps requests unanswered until `release`, so that a full queue, an abort or a disconnect can be looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

from mettle.errors import StorageError
from mettle.inference.engine.limits import Limits, check_request
from mettle.inference.engine.protocol import (
    EngineBusy,
    EngineStatus,
    EngineStopped,
    GenerationRequest,
    PauseMode,
    SamplingEngine,
    TokenEvent,
    TokenListener,
    TokenLogprob,
    WeightsRejected,
    WeightUpdate,
)
from mettle.inference.engine.sequences import RunningRequest
from mettle.inference.engine.served_adapters import ChosenAdapter, ServedAdapters
from mettle.storage.weights import ADAPTER_CONFIG, read_version

Answer = Callable[[Sequence[int], int], Sequence[int]]
"""Prompt ids and choice number to the ids of the completion."""

LOGPROB = -0.5


def echo(prompt_ids: Sequence[int], choice: int) -> Sequence[int]:
    """Say the prompt again, the same for each choice."""
    return list(prompt_ids)


class MockEngine:
    """Keeps the promises of `protocol.SamplingEngine` with answers made up beforehand."""

    def __init__(
        self,
        answer: Answer = echo,
        *,
        limits: Limits | None = None,
        vocab_size: int = 264,
        max_queue: int = 64,
        version: int = 0,
    ) -> None:
        self._answer = answer
        self._limits = limits or Limits(max_slots=64, max_model_len=256)
        self._vocab_size = vocab_size
        self._max_outstanding = self._limits.max_slots + max_queue
        self._version = version
        self._lock = threading.Lock()
        self._gate = threading.Event()
        self._gate.set()
        self._taken: dict[str, RunningRequest] = {}
        self._inbox: SimpleQueue[tuple[RunningRequest, ChosenAdapter[None] | None] | None] = SimpleQueue()
        self._is_paused = self._is_closed = False
        self._adapters = ServedAdapters[None]()
        self.aborted: list[str] = []
        self._thread = threading.Thread(target=self._run, name="mock-engine", daemon=True)
        self._thread.start()

    def hold(self) -> None:
        """Answer nothing until `release`."""
        self._gate.clear()

    def release(self) -> None:
        """Answer what was held."""
        self._gate.set()

    def submit(self, request: GenerationRequest, listener: TokenListener) -> None:
        """Take a request; see the protocol."""
        check_request(request, self._limits, self._vocab_size)
        chosen = self._adapters.choose(request)
        with self._lock:
            if self._is_closed:
                raise EngineStopped("the engine is shutting down")
            outstanding = sum(taken.request.n for taken in self._taken.values())
            if outstanding + request.n > self._max_outstanding:
                raise EngineBusy(f"{outstanding} sequences run or wait and no more are taken; try again later")
            taken = RunningRequest(request, listener)
            self._taken[request.request_id] = taken
        self._inbox.put((taken, chosen))

    def abort(self, request_id: str) -> None:
        """End a held request with no tokens."""
        with self._lock:
            taken = self._taken.pop(request_id, None)
        if taken is not None:
            self.aborted.append(request_id)
            taken.abort()

    def update_weights(self, folder: Path, version: int) -> WeightUpdate:
        """Answer as `version` from now on, if `folder` is a publication of it."""
        try:
            published = read_version(folder)
        except StorageError as error:
            raise WeightsRejected(str(error)) from error
        if published.version != version:
            raise WeightsRejected(f"{folder} holds version {published.version}, not {version}")
        self._version = version
        return WeightUpdate(version, 0.0, 0.0, None)

    def load_adapter(self, name: str, folder: Path, version: int | None = None) -> WeightUpdate:
        """Answer to one more name, if `folder` looks like an adapter."""
        if not (folder / ADAPTER_CONFIG).is_file():
            raise WeightsRejected(f"{folder} is no adapter: it has no {ADAPTER_CONFIG}")
        number = self._adapters.next_version(name) if version is None else version
        with self._lock:
            self._adapters.put(name, folder, 1, number, None)
        return WeightUpdate(number, 0.0, 0.0, None)

    def unload_adapter(self, name: str) -> None:
        """Answer to one name less."""
        with self._lock:
            self._adapters.remove(name)

    def pause(self, mode: PauseMode) -> None:
        """Hold what comes."""
        self._is_paused = True
        self._gate.clear()

    def resume(self) -> None:
        """Answer again."""
        self._is_paused = False
        self._gate.set()

    def status(self) -> EngineStatus:
        """Counts as of now: what is taken and not answered waits."""
        with self._lock:
            waiting = sum(taken.request.n for taken in self._taken.values())
        return EngineStatus(
            version=self._version,
            num_running=0,
            num_waiting=waiting,
            is_paused=self._is_paused,
            is_alive=not self._is_closed,
            max_slots=self._limits.max_slots,
            max_model_len=self._limits.max_model_len,
            vocab_size=self._vocab_size,
            total_aborted=len(self.aborted),
            adapters=self._adapters.statuses(),
        )

    def close(self) -> None:
        """Abort what is held and end the thread."""
        with self._lock:
            self._is_closed = True
            left = list(self._taken)
        for request_id in left:
            self.abort(request_id)
        self._gate.set()
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (next_one := self._inbox.get()) is not None:
            taken, chosen = next_one
            self._gate.wait()
            with self._lock:
                is_mine = self._taken.pop(taken.request.request_id, None) is not None
            if is_mine:
                self._say(taken, self._version if chosen is None else chosen.unit[1])

    def _say(self, running: RunningRequest, version: int) -> None:
        request = running.request
        if request.prompt_logprobs:
            running.prompt_logprobs = [None, *([LOGPROB] * (len(request.prompt_ids) - 1))]
            if request.top_logprobs:
                running.prompt_top_logprobs = [[], *([TokenLogprob(i, LOGPROB)] for i in request.prompt_ids[1:])]
        room = self._limits.max_model_len - len(request.prompt_ids)
        max_tokens = room if request.params.max_tokens is None else min(request.params.max_tokens, room)
        for choice in running.choices:
            said = list(self._answer(request.prompt_ids, choice.index))
            kept = said[:max_tokens]
            running.end_choice(choice, "stop" if len(kept) == len(said) else "length")
            for position, token_id in enumerate(kept):
                top = [TokenLogprob(token_id, LOGPROB)] if request.top_logprobs else []
                choice.token_ids.append(token_id)
                choice.logprobs.append(LOGPROB)
                choice.versions.append(version)
                if request.top_logprobs:
                    choice.top_logprobs.append(top)
                if request.has_token_events:
                    reason = choice.finish_reason if position == len(kept) - 1 else None
                    running.listener.on_token(TokenEvent(choice.index, token_id, LOGPROB, version, top, reason, None))
        running.finish()


_KEEPS_THE_PROTOCOL: type[SamplingEngine] = MockEngine
