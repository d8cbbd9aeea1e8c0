"""Continuous batching: who waits, who runs in which slot, and one step of it all.

A step admits what fits, computes the new prompts of about one length in one padded pass (equal prompts once, whoever
sent them), samples their first tokens, then decodes one token of every running sequence. There is no thread here:
whoever calls `step` owns the scheduler. Invariant: sequence i of `_running` has slot i; a slot that falls free is
filled by the last one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mettle.errors import MettleError, ServiceError
from mettle.inference.engine.decoder import Decoder, Span, padded_length
from mettle.inference.engine.limits import Limits, check_request
from mettle.inference.engine.protocol import GenerationRequest, RequestRefused, TokenListener, TokenLogprob
from mettle.inference.engine.sampler import BatchSampler, SampledTokens, SamplingPlan, choice_noise
from mettle.inference.engine.sequences import DecodeText, RunningRequest, RunningSequence
from mettle.inference.engine.slots import SlotCache

_LOGIT_ROWS = 1024


@dataclass(slots=True)
class Totals:
    """Counts since the start."""

    prompt_tokens: int = 0
    sampled_tokens: int = 0
    requests: int = 0
    aborted: int = 0
    steps: int = 0


class Scheduler:
    """The embedded engine without its thread. `eos_token_ids` end a choice unless its request ignores them."""

    def __init__(
        self,
        decoder: Decoder,
        limits: Limits,
        *,
        version: int = 0,
        eos_token_ids: Sequence[int] = (),
        decode_text: DecodeText | None = None,
        seed: int | None = None,
    ) -> None:
        self.version = version
        self.limits = limits
        self.totals = Totals()
        self._decoder = decoder
        self._eos = frozenset(eos_token_ids)
        self._decode_text = decode_text
        self._device = decoder.device
        self._sampler = BatchSampler(self._device, seed)
        longest = padded_length(limits.max_model_len)
        self._cache = SlotCache(decoder.shape, limits.max_slots, longest, self._device, decoder.dtype)
        self._waiting: deque[RunningRequest] = deque()
        self._running: list[RunningSequence] = []
        self._requests: dict[str, RunningRequest] = {}
        self._slots = torch.arange(limits.max_slots, device=self._device)
        self._plan: SamplingPlan | None = None
        self._token_ids: Tensor | None = None  # newest tokens and their positions, while the rows stay the same
        self._positions: Tensor | None = None

    @property
    def decoder(self) -> Decoder:
        """The decoder in use."""
        return self._decoder

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for one."""
        return sum(request.request.n for request in self._waiting)

    @property
    def kv_bytes(self) -> int:
        """Memory set aside for keys and values."""
        return self._cache.num_bytes

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request that can never run here. Reads only what does not change, so any thread may call it.

        Raises: RequestRefused.
        """
        check_request(request, self.limits, self._decoder.shape.vocab_size)
        if request.params.stop and self._decode_text is None:
            raise RequestRefused("stop strings need a tokenizer, and this engine has none", "stop")

    def add(self, request: GenerationRequest, listener: TokenListener) -> None:
        """Queue a request that passed `check`."""
        under_way = RunningRequest(request, listener)
        self._waiting.append(under_way)
        self._requests[request.request_id] = under_way
        self.totals.requests += 1

    @torch.inference_mode()
    def abort(self, request_id: str) -> None:
        """End a request with what it has; an unknown or finished one is ignored."""
        under_way = self._requests.get(request_id)
        if under_way is None:
            return
        if under_way in self._waiting:
            self._waiting.remove(under_way)
        self.totals.aborted += 1
        under_way.abort()
        self._settle()
        self._requests.pop(request_id, None)

    def abort_all(self) -> None:
        """End every request with what it has."""
        for request_id in list(self._requests):
            self.abort(request_id)

    def fail_all(self, error: MettleError) -> None:
        """Tell every listener that the engine failed."""
        for under_way in self._requests.values():
            under_way.fail(error)
        self._waiting.clear()
        self._running.clear()
        self._requests.clear()

    def swap(self, decoder: Decoder, version: int) -> None:
        """Go on with other weights of the same shape. Running sequences keep their keys and values."""
        assert decoder.shape == self._decoder.shape, "a swap keeps the model's shape"
        self._decoder, self.version = decoder, version

    @torch.inference_mode()
    def step(self, *, is_admitting: bool = True) -> bool:
        """Do one step; False when nothing is left to do (while not admitting, what waits does not count)."""
        admitted = self._admit() if is_admitting else []
        for alike in _by_length(admitted):
            self._prefill(alike)
        if self._running:
            self._decode()
        self.totals.steps += 1
        return bool(admitted or self._running or (is_admitting and self._waiting))

    def _admit(self) -> list[RunningRequest]:
        admitted: list[RunningRequest] = []
        prompts: set[tuple[int, ...]] = set()
        num_slots, longest = len(self._running), 0
        while self._waiting:
            request = self._waiting[0]
            prompt = tuple(request.request.prompt_ids)
            longest = max(longest, len(prompt))
            num_slots += request.num_slots
            is_too_much = (len(prompts) + (prompt not in prompts)) * longest > self.limits.max_prefill_tokens
            if num_slots > self.limits.max_slots or (admitted and is_too_much):
                break
            prompts.add(prompt)
            admitted.append(self._waiting.popleft())
        return admitted

    def _prefill(self, admitted: list[RunningRequest]) -> None:
        places: dict[tuple[int, ...], int] = {}
        owners = [places.setdefault(tuple(r.request.prompt_ids), len(places)) for r in admitted]
        sequences: list[RunningSequence] = []
        prompt_of: list[int] = []
        for request, place in zip(admitted, owners, strict=True):
            started = self._start(request)
            sequences += started
            prompt_of += [place] * len(started)
        first_slot = len(self._running)
        lengths = [len(prompt) for prompt in places]
        hidden_NPD = self._compute_prompts(list(places), prompt_of, first_slot)
        for request, place in zip(admitted, owners, strict=True):
            self.totals.prompt_tokens += len(request.request.prompt_ids)
            if request.request.prompt_logprobs:
                scored = self._score(request.request.prompt_ids, hidden_NPD[place, : lengths[place]])
                request.prompt_logprobs = scored
        if sequences:
            last_ND = hidden_NPD[torch.arange(len(lengths)), torch.tensor(lengths) - 1]
            logits_NV = self._decoder.logits(last_ND)
            logits_MV = logits_NV[torch.tensor(prompt_of, device=self._device)]
            sampled = self._sampler.sample(logits_MV, SamplingPlan(sequences, self._device))
            self._running += sequences
            self._give(sequences, sampled, first_slot)
        self._forget_batch()
        for request in admitted:
            self._finish_scored(request)
        self._settle()

    def _start(self, under_way: RunningRequest) -> list[RunningSequence]:
        request = under_way.request
        if under_way.num_slots == 0:
            return []
        params = request.params
        room = self.limits.max_model_len - len(request.prompt_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        return [
            RunningSequence(
                under_way,
                choice,
                max_tokens,
                stop_ids,
                _noise(request, choice.index),
                self._decode_text,
            )
            for choice in under_way.choices
        ]

    def _compute_prompts(self, prompts: list[tuple[int, ...]], prompt_of: list[int], first_slot: int) -> Tensor:
        width = padded_length(max(len(prompt) for prompt in prompts))
        padded = torch.tensor([[*prompt, *([0] * (width - len(prompt)))] for prompt in prompts], device=self._device)
        if not prompt_of:
            return self._decoder.prefill(padded)
        self._cache.reserve(first_slot + len(prompt_of), width)
        owner_M = torch.tensor(prompt_of, device=self._device)
        return self._decoder.prefill(
            padded, lambda layer, kv: self._cache.write_prompts(layer, kv, owner_M, first_slot)
        )

    def _score(self, prompt_ids: Sequence[int], hidden_PD: Tensor) -> list[float | None]:
        return [None, *score_tokens(self._decoder, torch.tensor(prompt_ids, device=self._device), hidden_PD).tolist()]

    def _finish_scored(self, under_way: RunningRequest) -> None:
        if under_way.num_slots == 0:
            for choice in under_way.choices:
                under_way.end_choice(choice, "length")
            self._finish(under_way)

    def _decode(self) -> None:
        rows = self._running
        if self._plan is None or self._token_ids is None or self._positions is None:
            self._plan = SamplingPlan(rows, self._device)
            newest = [row.choice.token_ids[-1] for row in rows]
            self._token_ids = torch.tensor(newest, device=self._device)
            self._positions = torch.tensor([row.length - 1 for row in rows], device=self._device)
        lengths = [row.length for row in rows]
        span = Span(min(lengths), max(lengths))
        self._cache.reserve(len(rows), span.longest)
        slots_B = self._slots[: len(rows)]
        hidden_BD = self._decoder.decode(self._token_ids, self._positions, slots_B, self._cache, span)
        sampled = self._sampler.sample(self._decoder.logits(hidden_BD), self._plan)
        self._token_ids = sampled.token_ids_B
        self._positions = self._positions + 1
        self._give(rows, sampled, 0)
        self._settle()

    def _give(self, rows: list[RunningSequence], sampled: SampledTokens, first_slot: int) -> None:
        version, top = self.version, sampled.top_logprobs
        none: list[TokenLogprob] | None = None
        token_ids = sampled.token_ids_B.tolist()
        for i, (row, token_id, logprob) in enumerate(zip(rows, token_ids, sampled.logprobs, strict=True)):
            if not math.isfinite(logprob):
                self._fail_row(row, first_slot + i)
            elif not row.has_ended:
                row.add(token_id, logprob, version, top.get(i, none) if top else none)
        self.totals.sampled_tokens += len(rows)

    def _fail_row(self, row: RunningSequence, slot: int) -> None:
        # What is not finite must not stay in the slot: the next sequence there would multiply it by 0 and get NaN.
        self._cache.clear(slot)
        error = ServiceError(f"the weights of version {self.version} gave a log-probability that is not finite")
        row.owner.fail(error)
        for choice in row.owner.choices:
            if choice.finish_reason is None:
                row.owner.end_choice(choice, "abort")

    def _settle(self) -> None:
        """Give back the slots of what has ended, tell its listeners, and close the gaps."""
        ended = [i for i, row in enumerate(self._running) if row.has_ended]
        if not ended:
            return
        owners = {id(owner): owner for i in ended if (owner := self._running[i].owner).num_open == 0}
        num_left = len(self._running) - len(ended)
        holes = [i for i in ended if i < num_left]
        movers = [i for i in range(num_left, len(self._running)) if not self._running[i].has_ended]
        if movers:
            self._cache.move(movers, holes, max(self._running[i].length for i in movers))
        for hole, mover in zip(holes, movers, strict=True):
            self._running[hole] = self._running[mover]
        del self._running[num_left:]
        self._forget_batch()
        for owner in owners.values():  # last, so that who hears of the end finds the slots free
            self._finish(owner)

    def _finish(self, under_way: RunningRequest) -> None:
        if self._requests.pop(under_way.request.request_id, None) is not None:
            under_way.finish()

    def _forget_batch(self) -> None:
        self._plan = self._token_ids = self._positions = None


def _noise(request: GenerationRequest, index: int) -> np.random.Generator | None:
    if request.seeds:
        return choice_noise(request.seeds[index], 0)
    return None if request.params.seed is None else choice_noise(request.params.seed, index)


def _by_length(requests: Sequence[RunningRequest]) -> list[list[RunningRequest]]:
    """Requests whose prompts are computed at one length together, so that a prompt's numbers depend on it alone."""
    found: dict[int, list[RunningRequest]] = {}
    for request in requests:
        found.setdefault(padded_length(len(request.request.prompt_ids)), []).append(request)
    return list(found.values())


def score_tokens(decoder: Decoder, token_ids_P: Tensor, hidden_PD: Tensor) -> Tensor:
    """Log-probabilities [P - 1] of the tokens after the first, at temperature 1."""
    parts = []
    for start in range(0, len(token_ids_P) - 1, _LOGIT_ROWS):
        targets = token_ids_P[start + 1 : start + 1 + _LOGIT_ROWS]
        logits = decoder.logits(hidden_PD[start : start + len(targets)])
        parts.append(torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0])
    return torch.cat(parts) if parts else hidden_PD.new_zeros(0)
