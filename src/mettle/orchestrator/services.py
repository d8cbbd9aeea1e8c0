"""Frozen models that algorithms ask: teachers and references, served by anybody under an OpenAI-compatible address.

Parts: `FrozenModel` and `Services` (the protocols), `HttpServices` (`[orchestrator.services.NAME]`), `InMemoryServices`
(functions, for tests and demonstrations). A model scores token ids as they stand, through `/completions` with `echo`,
so it must share the policy's vocabulary, which is asked before a run begins; what it says is at temperature 1.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mettle.clients.config import ClientConfig, transport_for
from mettle.errors import ProviderError, RolloutError, UserError
from mettle.records.tokens import FloatArray, IntArray

logger = logging.getLogger(__name__)

PROBE = "Seven red foxes, 42 grey geese: who was first?"
"""Plain letters, so that no token is part of a character."""
WORD_MARK = "\u2581"
"""What some tokenizers write for a space before a word."""


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

    async def check_vocabulary(self, token_ids: Sequence[int], text: str) -> None:
        """Ask what the ids of `text` are to this model, where it says what its tokens are.

        Raises: UserError when they are another text to it: its logprobs would be those of other words.
        """
        try:
            answer = await self._ask(token_ids)
        except RolloutError as error:  # it may yet come up; groups that it fails are tried again
            logger.warning("service %r could not be asked for its vocabulary: %s", self._name, error)
            return
        try:
            tokens = answer["choices"][0]["logprobs"]["tokens"][: len(token_ids)]
            said = "".join(tokens)
        except (KeyError, IndexError, TypeError):
            return
        if said.replace(WORD_MARK, " ").strip() != text.strip():
            raise UserError(
                f"service {self._name!r} ({self._model} at {self._transport.base_url}) has another tokenizer than the "
                f"policy: the ids of {text!r} are {said[:60]!r} to it; take a teacher with the policy's vocabulary"
            )

    async def _ask(self, token_ids: Sequence[int]) -> Any:
        body = {
            "model": self._model, "prompt": [int(i) for i in token_ids], "max_tokens": 0, "echo": True, "logprobs": 1,
            "temperature": 1.0,
        }  # fmt: skip
        async with self._slots:
            return await self._transport.post("/completions", body)

    async def logprobs(self, token_ids: IntArray) -> FloatArray:
        """Score the ids: a completion of no tokens that echoes its prompt."""
        answer = await self._ask(token_ids.tolist())
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

    async def check_vocabularies(self, encode: Callable[[str], Sequence[int]]) -> None:
        """Raises: UserError for a model to which the policy's token ids are other words; `encode` is the policy's."""
        for model in self._models.values():
            await model.check_vocabulary(encode(PROBE), PROBE)

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
