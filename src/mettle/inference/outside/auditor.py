"""The trusted engine that computes again what workers say: it samples nothing, and serves whatever version it is asked
about.

It is an engine of its own, so that the one that samples never waits for it and a version that the run has gone on from
can still be asked about. It costs a second model's memory and about a prefill of each completion that is checked.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from mettle.errors import MettleError
from mettle.inference.engine.protocol import (
    Generation,
    GenerationRequest,
    RedrawnToken,
    SamplingEngine,
    TokenEvent,
    WeightsRejected,
)
from mettle.inference.replicated import Serving
from mettle.records.sampling import SamplingParams

OpenEngine = Callable[[Serving], SamplingEngine]


class Auditor:
    """Asks an engine that `open_engine` starts when the first answer is to be checked. Its calls block."""

    def __init__(self, open_engine: OpenEngine) -> None:
        self._open_engine = open_engine
        self._lock = threading.Lock()
        self._engine: SamplingEngine | None = None
        self._serving: Serving | None = None

    def redraw(self, serving: Serving, requests: Sequence[GenerationRequest]) -> list[list[RedrawnToken]]:
        """The tokens of each request, drawn again under those weights.

        Raises: WeightsRejected when the weights are no longer there, MettleError when the engine fails.
        """
        with self._lock:
            engine = self._at(serving)
            for generation in _all_of(engine, shared_prompts(requests)):
                assert generation.redrawn is None, "a prompt alone was asked for"
            redrawn = [generation.redrawn for generation in _all_of(engine, requests)]
            if None in redrawn:
                raise WeightsRejected("the auditor's engine draws nothing again")
            return [tokens for tokens in redrawn if tokens is not None]

    def close(self) -> None:
        """End the engine."""
        with self._lock:
            if self._engine is not None:
                self._engine.close()
                self._engine = None

    def _at(self, serving: Serving) -> SamplingEngine:
        if self._engine is not None and not self._engine.status().is_alive:
            self._engine.close()
            self._engine = None
        if self._engine is None:
            self._engine = self._open_engine(serving)
        elif serving != self._serving:
            if serving.weights is None:  # the model itself is only there at the start
                self._engine.close()
                self._engine = self._open_engine(serving)
            else:
                self._engine.update_weights(serving.weights, serving.version)
        self._serving = serving
        return self._engine


def shared_prompts(requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    """The prompts that several completions continue, to be computed once, before these."""
    prompts = Counter(tuple(one.prompt_ids[: one.redraw.start]) for one in requests if one.redraw is not None)
    shared = [prompt for prompt, count in prompts.items() if count > 1]
    name = requests[0].request_id if requests else ""
    params = SamplingParams(max_tokens=0)
    return [GenerationRequest(f"{name}/prompt-{n}", prompt, params) for n, prompt in enumerate(shared)]


def _all_of(engine: SamplingEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    """What comes of requests that go in together. Raises: MettleError when one fails."""
    listeners = [_ScoreListener() for _ in requests]
    for request, listener in zip(requests, listeners, strict=True):
        engine.submit(request, listener)
    return [listener.generation() for listener in listeners]


class _ScoreListener:
    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._found: Generation | MettleError | None = None

    def on_token(self, event: TokenEvent) -> None:
        return

    def on_finish(self, generation: Generation) -> None:
        self._found = generation
        self._is_over.set()

    def on_failure(self, error: MettleError) -> None:
        self._found = error
        self._is_over.set()

    def generation(self) -> Generation:
        self._is_over.wait()
        if isinstance(self._found, MettleError):
            raise self._found
        assert self._found is not None, "a listener hears of one end"
        return self._found
