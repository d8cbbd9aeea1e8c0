"""Frozen models that algorithms ask: teachers and references, served by anybody under an OpenAI-compatible address.

Parts: `FrozenModel` and `Services` (the protocols), `HttpServices` (`[orchestrator.services.NAME]`), `InMemoryServices`
(functions, for tests and demonstrations). A model scores token ids as they stand, through `/completions` with `echo`,
so it must share the policy's vocabulary; what it says is at temperature 1.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from mettle.clients.config import ClientConfig, transport_for
from mettle.errors import ProviderError
from mettle.records.tokens import FloatArray, IntArray


class FrozenModel(Protocol):
    """A model whose weights do not change."""

    async def logprobs(self, token_ids: IntArray) -> FloatArray:
        """[N] natural-log probability of each token after those before it; 0 for the first.

        Raises: RolloutError when there is no answer, or the sequence is longer than the model takes.
        """
        ...


class Services(Protocol):
    """The models of a run by name."""

    def model(self, name: str) -> FrozenModel:
        """Raises: KeyError for a name that is not configured; configs are refused before it comes to that."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


class HttpModel:
    """One endpoint, asked at most `max_concurrency` things at a time."""

    def __init__(
        self,
        name: str,
        *,
        base_url: str,
        model: str,
        api_key_var: str | None = None,
        max_concurrency: int = 32,
        timeout_s: float = 120.0,
    ) -> None:
        self._name = name
        self._model = model
        self._slots = asyncio.Semaphore(max_concurrency)
        self._transport = transport_for(ClientConfig(base_url, api_key_var=api_key_var, timeout=timeout_s))

    async def logprobs(self, token_ids: IntArray) -> FloatArray:
        """Score the ids: a completion of no tokens that echoes its prompt."""
        body = {
            "model": self._model, "prompt": token_ids.tolist(), "max_tokens": 0, "echo": True, "logprobs": 1,
            "temperature": 1.0,
        }  # fmt: skip
        async with self._slots:
            answer = await self._transport.post("/completions", body)
        try:
            # The first token has no logprob; some servers sample a token even when asked for none.
            found = answer["choices"][0]["logprobs"]["token_logprobs"][1 : len(token_ids)]
            scored = np.array([0.0, *found], np.float32)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ProviderError(
                f"service {self._name!r} ({self._transport.base_url}) does not tell the logprobs of a prompt: {error!r}"
            ) from error
        if len(scored) != len(token_ids) or not math.isfinite(float(scored.sum())):
            raise ProviderError(
                f"service {self._name!r} gave {len(scored)} logprobs for {len(token_ids)} tokens, or some not finite"
            )
        return scored

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()


class HttpServices:
    """Models behind HTTP endpoints."""

    def __init__(self, models: Mapping[str, HttpModel]) -> None:
        self._models = models

    def model(self, name: str) -> FrozenModel:
        """The model called `name`."""
        return self._models[name]

    async def close(self) -> None:
        """Close every connection."""
        for model in self._models.values():
            await model.close()


class InMemoryServices:
    """Models that are functions from token ids to logprobs."""

    def __init__(self, models: Mapping[str, Callable[[IntArray], FloatArray]] | None = None) -> None:
        self._models = {name: _FunctionModel(function) for name, function in (models or {}).items()}

    def model(self, name: str) -> FrozenModel:
        """The model called `name`."""
        return self._models[name]

    async def close(self) -> None:
        """Nothing to close."""


class _FunctionModel:
    def __init__(self, function: Callable[[IntArray], FloatArray]) -> None:
        self._function = function

    async def logprobs(self, token_ids: IntArray) -> FloatArray:
        await asyncio.sleep(0)  # other groups may go on meanwhile, as with a server
        return self._function(token_ids)
