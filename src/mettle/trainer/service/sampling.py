"""Sample requests: taken in turn between owners, run by an engine, recorded as outcomes.

Log-probabilities are always those of the policy itself, at temperature 1 and with its whole support, for training
compares them with its own: where a request asks for another distribution, what it drew is scored again.
Invariant: a request that was accepted ends with an outcome, whether it is sampled, refused or cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from mettle.errors import MettleError, UserError
from mettle.inference.bridge import Bridge
from mettle.inference.engine.protocol import Choice, EngineBusy, Generation, GenerationRequest, RequestRefused
from mettle.records.sampling import SamplingParams
from mettle.trainer.service.bodies import DrawBody, SampleBody, read_body_of
from mettle.trainer.service.fairness import DeficitRoundRobin, Wish
from mettle.trainer.service.records import Operation, Outcome
from mettle.trainer.service.samplers import SamplerPool, SamplingWeights
from mettle.trainer.service.scoring import PromptScores
from mettle.trainer.service.store import Store
from mettle.trainer.service.wire.answers import SampleAnswer, SampledText
from mettle.trainer.service.wire.orders import read_tokens

logger = logging.getLogger(__name__)

_QUANTUM: Final = 4096
_BUSY_S: Final = 0.2


class SampleRunner:
    """Runs samples, at most `max_running` requests at a time. Lives in the event loop."""

    def __init__(
        self,
        store: Store,
        pool: SamplerPool,
        scores: PromptScores,
        folder_of: Callable[[Operation, SampleBody], str],
        on_settled: Callable[[str], None],
        *,
        max_running: int,
    ) -> None:
        self._store, self._pool, self._scores = store, pool, scores
        self._folder_of, self._on_settled = folder_of, on_settled
        self._max_running = max_running
        self._waiting: dict[str, list[Operation]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._fair = DeficitRoundRobin(_QUANTUM)

    def add(self, operation: Operation) -> None:
        """Let an accepted sample wait for its turn."""
        self._waiting.setdefault(operation.owner, []).append(operation)
        self._dispatch()

    def cancel(self, request_id: str, error: str) -> None:
        """End a sample, wherever it is."""
        if self._store.cancel(request_id, error):
            task = self._running.get(request_id)
            if task is not None:
                task.cancel()
            self._on_settled(request_id)

    async def close(self) -> None:
        """Stop; what has no outcome is sampled after the next start."""
        self._waiting.clear()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _dispatch(self) -> None:
        while len(self._running) < self._max_running and (waiting := {o: w for o, w in self._waiting.items() if w}):
            owner = self._fair.pick({o: Wish(o, max(1, len(w[0].body) // 4)) for o, w in waiting.items()})
            operation = self._waiting[owner].pop(0)
            task = asyncio.create_task(self._run(operation), name=f"sample {operation.request_id}")
            self._running[operation.request_id] = task
            task.add_done_callback(partial(self._ended, operation.request_id))

    def _ended(self, request_id: str, _: object) -> None:
        self._running.pop(request_id, None)
        self._dispatch()

    async def _run(self, operation: Operation) -> None:
        outcome = self._store.outcome(operation.request_id)
        if outcome is None or outcome.state != "waiting":
            return
        try:
            outcome = await self._sample(operation)
        except (UserError, RequestRefused) as error:
            outcome = Outcome("failed", "sample", b"", "user", str(error))
        except MettleError as error:
            outcome = Outcome("failed", "sample", b"", "server", str(error))
        except Exception as error:  # the boundary of the task: the error belongs to one request
            logger.exception("a sample failed", extra={"request": operation.request_id})
            outcome = Outcome("failed", "sample", b"", "server", f"{type(error).__name__}: {error}")
        self._store.settle(operation, outcome)
        self._on_settled(operation.request_id)

    async def _sample(self, operation: Operation) -> Outcome:
        body = read_body_of(SampleBody, operation.body)
        if body.record_stability_info:
            raise UserError("record_stability_info: the loss stable_reinforce is not offered by this server")
        prompt = read_tokens(body.prompt, "prompt")
        folder = self._folder_of(operation, body)
        has_prompt_scores = bool(
            body.topk_prompt_logprobs or body.target_prompt_logprobs is not None or body.prompt_alt_tokens_k
        )
        params = _params(body.sampling_params)
        async with self._pool.using(folder) as weights:
            request = GenerationRequest(
                operation.request_id, prompt, params, body.num_samples,
                prompt_logprobs=bool(body.prompt_logprobs), top_logprobs=body.topk_sample_logprobs,
                adapter=weights.adapter,
            )  # fmt: skip
            generation = await _generate(weights.bridge, request)
            is_own = params.temperature in (0.0, 1.0) and params.is_the_policys
            texts = []
            for choice in generation.choices:
                own = None if is_own else await _own_logprobs(weights, operation, prompt, choice)
                texts.append(_text(choice, own, has_alternatives=bool(body.topk_sample_logprobs)))
        logprobs = None
        if generation.prompt_logprobs is not None:
            logprobs = np.array([np.nan if p is None else p for p in generation.prompt_logprobs], np.float32)
            _keep_last(logprobs, body.prompt_logprobs_last_n)
        answer = SampleAnswer(texts, prompt_logprobs=logprobs)
        if has_prompt_scores:
            answer = await self._scores.added_to(answer, folder, prompt, body)
        num_tokens = len(prompt) + sum(len(choice.token_ids) for choice in generation.choices)
        return Outcome("done", "sample", answer.encode(), num_tokens=num_tokens)


async def _generate(bridge: Bridge, request: GenerationRequest) -> Generation:
    while True:
        try:
            return await bridge.generate(request)
        except EngineBusy:
            await asyncio.sleep(_BUSY_S)


async def _own_logprobs(
    weights: SamplingWeights, operation: Operation, prompt: Sequence[int], choice: Choice
) -> list[float]:
    """The policy's own log-probabilities of what was drawn from another distribution."""
    scored = GenerationRequest(
        f"{operation.request_id}/scored/{choice.index}", [*prompt, *choice.token_ids], SamplingParams(max_tokens=0),
        prompt_logprobs=True, adapter=weights.adapter,
    )  # fmt: skip
    generation = await _generate(weights.bridge, scored)
    assert generation.prompt_logprobs is not None, "they were asked for"
    return [p for p in generation.prompt_logprobs[len(prompt) :] if p is not None]


def _params(asked: DrawBody) -> SamplingParams:
    """None as `stop` leaves the model's own end; whatever else is said takes its place, an empty list too."""
    stop = asked.stop
    texts: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    if isinstance(stop, str):
        texts = (stop,)
    elif stop:
        texts = tuple(each for each in stop if isinstance(each, str))
        ids = tuple(each for each in stop if isinstance(each, int))
    return SamplingParams(
        max_tokens=asked.max_tokens, temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k or -1,
        seed=asked.seed, stop=texts, stop_token_ids=ids, ignore_eos=stop is not None,
    )  # fmt: skip


def _text(choice: Choice, own: list[float] | None, *, has_alternatives: bool) -> SampledText:
    rows = [[(each.token_id, each.logprob) for each in row] for row in choice.top_logprobs]
    return SampledText(
        choice.token_ids,
        choice.logprobs if own is None else own,
        choice.finish_reason == "stop",
        rows if has_alternatives else None,
    )


def _keep_last(logprobs: np.ndarray, last: int | None) -> None:
    if last is not None:
        logprobs[: max(0, len(logprobs) - last)] = np.nan
