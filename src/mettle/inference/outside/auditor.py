"""The trusted engine that computes again what workers say: it samples nothing, and serves whatever version it is asked
about.

It is an engine of its own, so that the one that samples never waits for it and a version that the run has gone on from
can still be asked about. It costs a second model's memory and about a prefill of each completion that is checked.
"""

from __future__ import annotations

import threading
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
            listeners = [_ScoreListener() for _ in requests]
            for request, listener in zip(requests, listeners, strict=True):
                engine.submit(request, listener)
            return [listener.redrawn() for listener in listeners]

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

    def redrawn(self) -> list[RedrawnToken]:
        self._is_over.wait()
        if isinstance(self._found, MettleError):
            raise self._found
        if self._found is None or self._found.redrawn is None:
            raise WeightsRejected("the auditor's engine draws nothing again")
        return self._found.redrawn
