"""Models that algorithms ask: teachers and references, served by anybody under an OpenAI-compatible address, and the
policy itself.

Parts: `ScoringModel` and `Services` (the protocols), `HttpServices` (`[orchestrator.services.NAME]`, and the run's own
engine as `policy`), `InMemoryServices` (functions, for tests and demonstrations). A model scores token ids as they
stand, through `/completions` with `echo`, so it must share the policy's vocabulary, which is asked before a run begins;
what it says is at temperature 1.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mettle.clients.config import ClientConfig, transport_for
from mettle.clients.renderer import PROBE, Renderer
from mettle.errors import MettleError, ProviderError, RolloutError, UserError
from mettle.orchestrator.server import EndpointFile
from mettle.records.tokens import FloatArray, IntArray
from mettle.records.versions import POLICY
from mettle.web.keys import API_KEY_ENV

logger = logging.getLogger(__name__)

WORD_MARK = "\u2581"
"""What some tokenizers write for a space before a word."""


LISTED = "token_id:"
"""How an endpoint names a token by its id, where it is asked to (vLLM's word)."""


class ScoringModel(Protocol):
    """A model that says how likely tokens are. Teachers and references do not change; the policy does."""

    async def logprobs(self, token_ids: IntArray) -> FloatArray:
        """[N] natural-log probability of each token after those before it; 0 for the first.

        Raises: RolloutError when there is no answer, or the sequence is longer than the model takes.
        """
        ...

    async def likeliest(self, token_ids: IntArray, number: int) -> tuple[IntArray, FloatArray]:
        """([N, number] ids, [N, number] log-probabilities) of the likeliest tokens in the place of each; -inf where it
        says fewer, and in the first row.

        Raises: RolloutError as `logprobs` does.
        """
        ...


class Services(Protocol):
    """The models of a run by name."""

    def model(self, name: str) -> ScoringModel:
        """Raises: KeyError for a name that is not configured; configs are refused before it comes to that."""
        ...

    def render(self, messages: Sequence[Mapping[str, Any]]) -> IntArray:
        """The policy's tokens of some messages, without an opening for an answer."""
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
        max_retries: int = ClientConfig.max_retries,
    ) -> None:
        self._name = name
        self._model = model
        self._slots = asyncio.Semaphore(max_concurrency)
        endpoint = ClientConfig(base_url, api_key_var=api_key_var, timeout=timeout_s, max_retries=max_retries)
        self._transport = transport_for(endpoint)

    async def check_vocabulary(self, token_ids: Sequence[int], text: str) -> None:
        """Ask what the ids of `text` are to this model, where it says what its tokens are.

        Raises: UserError when they are another text to it: its logprobs would be those of other words; RolloutError
        when there is no answer.
        """
        answer = await self._ask(token_ids)
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

    async def _ask(self, token_ids: Sequence[int], **more: Any) -> Any:
        body = {
            "model": self._model, "prompt": [int(i) for i in token_ids], "max_tokens": 0, "echo": True, "logprobs": 1,
            "temperature": 1.0, **more,
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

    async def likeliest(self, token_ids: IntArray, number: int) -> tuple[IntArray, FloatArray]:
        """Score the ids, and ask for the alternatives, by their ids, at each."""
        answer = await self._ask(token_ids.tolist(), logprobs=number, return_tokens_as_token_ids=True)
        ids = np.zeros((len(token_ids), number), np.int32)
        logprobs = np.full((len(token_ids), number), -np.inf, np.float32)
        try:
            told = answer["choices"][0]["logprobs"]["top_logprobs"]
            for place in range(1, len(token_ids)):
                found = sorted(told[place].items(), key=lambda one: -one[1])[:number]
                ids[place, : len(found)] = [int(name.removeprefix(LISTED)) for name, _ in found]
                logprobs[place, : len(found)] = [value for _, value in found]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ProviderError(
                f"service {self._name!r} ({self._transport.base_url}) does not tell the likeliest tokens of a prompt "
                f"by their ids: {error!r}; use Mettle's engine or vLLM, or leave top_k out"
            ) from error
        return ids, logprobs

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()


class OwnModel:
    """The run's own engine, wherever it listens at the moment. `served_as` is the policy's name there."""

    def __init__(self, endpoint: EndpointFile, served_as: str) -> None:
        self._endpoint = endpoint
        self._served_as = served_as
        self._now: tuple[str, HttpModel] | None = None

    async def logprobs(self, token_ids: IntArray) -> FloatArray:
        """What the engine says of the ids now."""
        return await (await self._model()).logprobs(token_ids)

    async def likeliest(self, token_ids: IntArray, number: int) -> tuple[IntArray, FloatArray]:
        """What the engine would likeliest say in their places now."""
        return await (await self._model()).likeliest(token_ids, number)

    async def _model(self) -> HttpModel:
        url = self._endpoint.base_url
        if self._now is None or self._now[0] != url:
            await self.close()
            self._now = (url, HttpModel(POLICY, base_url=url, model=self._served_as, api_key_var=API_KEY_ENV))
        return self._now[1]

    async def close(self) -> None:
        """Close the connections."""
        before, self._now = self._now, None
        if before is not None:
            await before[1].close()


class HttpServices:
    """Models behind HTTP endpoints."""

    def __init__(
        self, models: Mapping[str, HttpModel], *, policy: OwnModel | None = None, renderer: Renderer | None = None
    ) -> None:
        self._models = models
        self._policy = policy
        self._renderer = renderer

    def model(self, name: str) -> ScoringModel:
        """The model called `name`."""
        if name == POLICY and self._policy is not None:
            return self._policy
        return self._models[name]

    def render(self, messages: Sequence[Mapping[str, Any]]) -> IntArray:
        """By the policy's chat template.

        Raises: UserError when the template doesn't take such messages alone.
        """
        assert self._renderer is not None, "the orchestrator gives its renderer"
        try:
            return np.array(self._renderer.render(messages, add_generation_prompt=False), np.int32)
        except MettleError:
            raise
        except Exception as error:
            raise UserError(f"the chat template takes no {messages[0].get('role')} message alone: {error}") from error

    async def check_vocabularies(self, encode: Callable[[str], Sequence[int]]) -> None:
        """Raises: UserError for a model to which the policy's token ids are other words; `encode` is the policy's."""
        for name, model in self._models.items():
            try:
                await model.check_vocabulary(encode(PROBE), PROBE)
            except RolloutError as error:  # it may yet come up again; groups that it fails are tried again
                logger.warning("service %r could not be asked for its vocabulary: %s", name, error)

    async def check_answers(self, token_ids: Sequence[int], text: str) -> None:
        """Ask each model to score the ids of `text`, before a run is made that would wait for it.

        Raises: UserError for a model that does not answer, that scores nothing, or to which they are another text.
        """
        for name, model in self._models.items():
            try:
                await model.logprobs(np.array(token_ids, np.int32))
                await model.check_vocabulary(token_ids, text)
            except RolloutError as error:
                raise UserError(
                    f"service {name!r} cannot be asked: {error}; start it first, or mend orchestrator.services.{name}"
                ) from error

    async def close(self) -> None:
        """Close every connection."""
        for model in self._models.values():
            await model.close()
        if self._policy is not None:
            await self._policy.close()


class InMemoryServices:
    """Models that are functions from token ids to logprobs."""

    def __init__(
        self, models: Mapping[str, Callable[[IntArray], FloatArray]] | None = None, *, vocab_size: int = 0
    ) -> None:
        self._models = {name: _FunctionModel(function, vocab_size) for name, function in (models or {}).items()}

    def model(self, name: str) -> ScoringModel:
        """The model called `name`."""
        return self._models[name]

    def render(self, messages: Sequence[Mapping[str, Any]]) -> IntArray:
        """The bytes of what was said."""
        return np.frombuffer("".join(str(m["content"]) for m in messages).encode(), np.uint8).astype(np.int32)

    async def close(self) -> None:
        """Nothing to close."""


class _FunctionModel:
    def __init__(self, function: Callable[[IntArray], FloatArray], vocab_size: int) -> None:
        self._function = function
        self._vocab_size = vocab_size

    async def logprobs(self, token_ids: IntArray) -> FloatArray:
        await asyncio.sleep(0)  # other groups may go on meanwhile, as with a server
        return self._function(token_ids)

    async def likeliest(self, token_ids: IntArray, number: int) -> tuple[IntArray, FloatArray]:
        """By asking the function for every token of a small vocabulary in every place."""
        ids = np.zeros((len(token_ids), number), np.int32)
        logprobs = np.full((len(token_ids), number), -np.inf, np.float32)
        for place in range(1, len(token_ids)):
            tried = np.array([self._function(np.append(token_ids[:place], i))[-1] for i in range(self._vocab_size)])
            order = np.argsort(-tried, kind="stable")[:number]
            ids[place, : len(order)], logprobs[place, : len(order)] = order, tried[order]
        return ids, logprobs
