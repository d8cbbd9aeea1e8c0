"""Continuous batching: one step of everything that is under way.

A step admits what there are slots and bytes for (`admission.py`), computes so many tokens of the new prompts
(`prompts.py`), samples the first tokens of those that are through, then decodes one token of every running sequence;
choices of one prompt that have said the same so far are computed once, and part when they sample different tokens.
Where a sequence needs a larger slot and there is none, the youngest gives up its keys and values and begins again
later, keeping its tokens and the state of its noise: the tokens that it has are put through the decoder one by one, as
when they were sampled, so that what follows is the same to the last bit (if the weights have changed meanwhile, its
keys and values are the new weights' from then on). There is no thread here: whoever calls `step` owns the scheduler.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mettle.errors import MettleError, ServiceError
from mettle.inference.engine.adapter_stacks import AdapterStacks
from mettle.inference.engine.adapters import AdapterWeights, RowsOfAdapters, head_rows
from mettle.inference.engine.admission import EngineAdmission, QueuedRequest
from mettle.inference.engine.attention import Kin
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.grammars import Grammars, TokenConstraint
from mettle.inference.engine.limits import Limits, check_request
from mettle.inference.engine.memory import KvMemory
from mettle.inference.engine.prefixes import Unit
from mettle.inference.engine.prompts import PromptBatch
from mettle.inference.engine.protocol import GenerationRequest, RequestRefused, TokenListener, TokenLogprob
from mettle.inference.engine.sampler import BatchSampler, SampledTokens, SamplingPlan, choice_noise
from mettle.inference.engine.sequences import DecodeText, RunningRequest, RunningSequence, ends_of
from mettle.inference.engine.served_adapters import ServedAdapters
from mettle.inference.engine.slots import KvSizes

WORTHWHILE = 0.75
"""Sequences that have said the same so far are computed once where there are at most so many kinds, beside all."""


@dataclass(slots=True)
class Totals:
    """Counts since the start. `prefix_hit_tokens` of the prompts' tokens were not computed but known."""

    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    sampled_tokens: int = 0
    requests: int = 0
    aborted: int = 0
    preempted: int = 0
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
        policy_adapter: AdapterWeights | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.version = version
        self.limits = limits
        self.totals = Totals()
        self._decoder = decoder
        self._policy_adapter = policy_adapter
        self._stacks = AdapterStacks()
        self._grammars = grammars
        self._eos = frozenset(eos_token_ids)
        self._decode_text = decode_text
        self._device = decoder.device
        self._sampler = BatchSampler(self._device, seed)
        self.memory = KvMemory(KvSizes(decoder.shape, decoder.dtype), limits, self._device)
        self._slots = self.memory.slots
        self._admission = EngineAdmission(limits, self.memory)
        self._prompts: deque[PromptBatch] = deque()
        self.adapters = ServedAdapters[AdapterWeights](limits.max_adapters, limits.max_adapter_versions)
        self._requests: dict[str, RunningRequest] = {}
        self._batch: _StepBatch | None = None  # while the running sequences stay the same
        self._kinds = itertools.count(1)

    @property
    def decoder(self) -> Decoder:
        """The decoder in use."""
        return self._decoder

    @property
    def num_running(self) -> int:
        """Sequences that have a slot, or whose prompt is being computed."""
        return sum(len(one.rows) for one in self._slots.classes) + sum(len(b.sequences) for b in list(self._prompts))

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for one."""
        return self._admission.num_waiting

    @property
    def has_begun(self) -> bool:
        """True while anything that was begun has not ended, be it running or taken back."""
        return bool(self._prompts or self._admission.back or any(self._slots.in_use()))

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request that can never run here. Reads only what does not change, so any thread may call it.

        A grammar is compiled here.
        Raises: RequestRefused.
        """
        has_grammars = self._grammars is not None
        vocab_size = self._decoder.shape.vocab_size
        check_request(request, self.limits, vocab_size, keeps_grammars=has_grammars, draws_again=True)
        self.adapters.check(request)
        self._constraint(request)
        if request.params.stop and self._decode_text is None:
            raise RequestRefused("stop strings need a tokenizer, and this engine has none", "stop")

    def add(self, request: GenerationRequest, listener: TokenListener) -> None:
        """Queue a request that passed `check`."""
        try:
            adapter = self.adapters.choose(request)
            under_way = RunningRequest(request, listener, self.totals.requests, adapter)
            sequences = self._sequences(under_way)
        except RequestRefused as error:  # it was unloaded since `check`
            listener.on_failure(error)
            return
        self._admission.waiting.append(QueuedRequest(under_way, sequences))
        self._requests[request.request_id] = under_way
        self.totals.requests += 1

    @torch.inference_mode()
    def abort(self, request_id: str) -> None:
        """End a request with what it has; an unknown or finished one is ignored."""
        under_way = self._requests.pop(request_id, None)
        if under_way is None:
            return
        self.totals.aborted += 1
        self._admission.forget(under_way)
        under_way.end_rest()
        self._free_ended()
        self._drop_unwanted_prompts()
        under_way.finish()  # last, so that who hears of the end finds the slots free

    def abort_all(self) -> None:
        """End every request with what it has."""
        for request_id in list(self._requests):
            self.abort(request_id)

    def fail_all(self, error: MettleError) -> None:
        """Tell every listener that the engine failed."""
        for under_way in self._requests.values():
            under_way.fail(error)
        self._admission.clear()
        self._prompts.clear()
        self.memory.promised = 0
        for one in self._slots.classes:
            one.rows.clear()
        self._batch = None
        self._requests.clear()

    def swap(self, decoder: Decoder, version: int, policy_adapter: AdapterWeights | None = None) -> None:
        """Go on with other weights of the same shape. Running sequences keep their keys and values.

        `policy_adapter` is what the policy adds to the decoder's weights: every row gets it that asked for no adapter.
        """
        assert decoder.shape == self._decoder.shape, "a swap keeps the model's shape"
        # Adapters add to the base: what they computed upon the old one is no use either.
        upon_old = self.adapters.units() if decoder is not self._decoder else set()
        self._forget_prefixes({("", self.version), *upon_old})
        self._decoder, self.version, self._policy_adapter = decoder, version, policy_adapter
        self._stacks.forget()
        self._batch = None

    def put_adapter(self, name: str, path: Path, version: int, weights: AdapterWeights) -> None:
        """Serve an adapter's version as its newest. Running sequences keep their keys and values.

        Raises: WeightsRejected.
        """
        self.adapters.put(name, path, weights.rank, version, weights)
        self._forget_prefixes({(name, version)})
        self._stacks.forget()
        self._batch = None

    def remove_adapter(self, name: str) -> None:
        """Take no more requests for an adapter."""
        self.adapters.remove(name)
        self._stacks.forget()
        self._forget_prefixes(set())

    def _forget_prefixes(self, stale: set[Unit]) -> None:
        for batch in self._prompts:
            batch.is_pure = False
        self.memory.prefixes.keep_only({("", self.version), *self.adapters.units()} - stale)

    @torch.inference_mode()
    def step(self, *, is_admitting: bool = True) -> bool:
        """Do one step; False when nothing is left to do (while not admitting, what waits does not count)."""
        self._admit(is_new_wanted=is_admitting)
        self._compute_prompts()
        self._grow()
        if any(self._slots.in_use()):
            self._decode()
        self.totals.steps += 1
        return self.has_begun or (is_admitting and bool(self._admission.waiting))

    def _sequences(self, under_way: RunningRequest) -> list[RunningSequence]:
        request = under_way.request
        if under_way.is_scoring:
            return []
        max_tokens, stop_ids = ends_of(request, self.limits.max_model_len, self._eos)
        return [
            RunningSequence(
                under_way, choice, max_tokens, stop_ids, _noise(request, choice.index), self._decode_text,
                self._constraint(request),
            )
            for choice in under_way.choices
        ]  # fmt: skip

    def _constraint(self, request: GenerationRequest) -> TokenConstraint | None:
        constraint = request.params.constraint
        return None if constraint is None or self._grammars is None else self._grammars.begin(constraint)

    def _admit(self, *, is_new_wanted: bool) -> None:
        if not self._prompts and not any(self._slots.in_use()):
            self._admission.has_room = True  # nobody is left to take anything from
        num_pending = sum(batch.num_left for batch in self._prompts)
        admitted = self._admission.admit(self.version, self.num_running, num_pending, is_new_wanted=is_new_wanted)
        for prompts in admitted:
            self._prompts.append(PromptBatch(self._decoder, prompts))

    def _compute_prompts(self) -> None:
        num_tokens = self.limits.max_prefill_tokens
        while self._prompts and num_tokens > 0:
            num_tokens -= self._prompts[0].compute(
                self._decoder,
                num_tokens,
                self._policy_adapter,
                is_recording_experts=self.limits.is_recording_experts,
            )
            if self._prompts[0].last_ND is None:
                return
            self._begin(self._prompts.popleft())

    def _begin(self, batch: PromptBatch) -> None:
        """Sample the first tokens of prompts that are through, and give their sequences slots."""
        assert batch.last_ND is not None, "the batch is computed"
        self.memory.promised -= batch.promised
        self._count_prompts(batch)
        self._tell_kin(batch)
        prompt_of = {id(row): i for i, prompt in enumerate(batch.prompts) for row in prompt.sequences}
        rows = batch.sequences
        if fresh := [row for row in rows if not row.is_replaying]:
            self._sample_first(batch, fresh, [prompt_of[id(row)] for row in fresh])
        for row in rows:
            row.is_pure = batch.is_pure
            if row.is_replaying:
                row.step_on()
        staying = [row for row in rows if not row.has_ended]
        self._slots.place(staying, [prompt_of[id(row)] for row in staying], batch.kv_NLKTE)
        if batch.is_pure and bool(torch.isfinite(batch.last_ND).all()):
            for i, prompt in enumerate(batch.prompts):
                self.memory.prefixes.insert(prompt.unit, prompt.token_ids, batch.kv_NLKTE[i])
        self._batch = None
        self._settle(rows)
        self._finish_scoring(batch)

    def _tell_kin(self, batch: PromptBatch) -> None:
        """Sequences of one prompt are kin: all that was computed of them is equal."""
        for prompt in batch.prompts:
            kind = next(self._kinds)
            for row in prompt.sequences:
                # One that goes through its tokens again has keys of another version, maybe.
                row.kin = next(self._kinds) if row.is_replaying else kind

    def _sample_first(self, batch: PromptBatch, rows: Sequence[RunningSequence], prompts: list[int]) -> None:
        """Sample for each of `rows` from the last position of its prompt, whose number in the batch is in `prompts`."""
        assert batch.last_ND is not None, "the batch is computed"
        logits_NV = self._decoder.logits(batch.last_ND, head_rows(batch.adapters, self._device))
        experts_NW = batch.last_experts_NW
        if prompts != list(range(len(logits_NV))):
            logits_NV = logits_NV[prompts]
            experts_NW = None if experts_NW is None else experts_NW[prompts]
        self._give(rows, self._sampler.sample(logits_NV, SamplingPlan(rows, self._device)), experts_NW)

    def _finish_scoring(self, batch: PromptBatch) -> None:
        """Requests that wanted the log-probabilities of their prompts alone have all that they asked for."""
        for owner in (owner for prompt in batch.prompts for owner in prompt.owners if owner.is_scoring):
            for choice in owner.choices:
                owner.end_choice(choice, "length")
            self._finish(owner)

    def _count_prompts(self, batch: PromptBatch) -> None:
        for prompt in batch.prompts:
            for owner in prompt.owners:
                if owner.request.prompt_logprobs:
                    owner.prompt_logprobs = [None, *prompt.scores]
                    if (top := owner.request.top_logprobs) > 0:
                        owner.prompt_top_logprobs = [[], *(found[:top] for found in prompt.alternatives)]
                if owner.request.redraw is not None:
                    owner.redrawn = prompt.redrawn_of(owner).found
                if not owner.is_counted:
                    owner.is_counted = True
                    self.totals.prompt_tokens += len(prompt.token_ids)
                    self.totals.prefix_hit_tokens += prompt.start

    def _grow(self) -> None:
        """Move sequences that outgrew their slots, taking memory from the youngest when there is none."""
        while (found := next(self._slots.outgrown(), None)) is not None:
            source, index = found
            row = source.rows[index]
            self._batch = None
            if self.memory.claim(self._slots.class_of(row.length).bytes_for(1)):
                self._slots.move_up(source, index)
            else:
                self._take_from_youngest()

    def _take_from_youngest(self) -> None:
        rows = self._slots.rows
        youngest = max(rows, key=lambda row: row.age)
        if newer := [batch for batch in self._prompts if batch.age > youngest.age]:
            self._put_back(newer[-1])
            return
        self.totals.preempted += 1
        found = self._slots.find(youngest)
        assert found is not None, "it is running"
        owner, index = found
        owner.close_gaps([index])
        self._admission.take_back(QueuedRequest(youngest.owner, [youngest]))

    def _put_back(self, batch: PromptBatch) -> None:
        self._prompts.remove(batch)
        self.memory.promised -= batch.promised
        for prompt in batch.prompts:
            for owner in prompt.owners:
                rows = [row for row in prompt.sequences if row.owner is owner and not row.has_ended]
                if rows or (owner.is_scoring and not owner.is_settled):
                    self._admission.take_back(QueuedRequest(owner, rows))

    def _decode(self) -> None:
        batch = self._batch
        if batch is None:
            batch = self._batch = _StepBatch(self._slots.rows, self._device)
            batch.adapters = self._adapters_of(batch.rows)
        spans = [one.span([row.length for row in one.rows]) for one in self._slots.in_use()]
        routes: list[Tensor] | None = [] if self.limits.is_recording_experts else None
        kin = None if batch.adapters or routes is not None else batch.kin()
        hidden_RD = self._decoder.decode(batch.token_ids, batch.positions, spans, batch.adapters, routes, kin)
        logits_RV = self._decoder.logits(hidden_RD, batch.adapters)
        sampled = self._sampler.sample(logits_RV if kin is None else logits_RV[kin.which_B], batch.plan)
        self._give(batch.rows, sampled, torch.cat(routes, -1) if routes else None)
        batch.step_on(sampled.token_ids_B)
        self._settle(batch.rows)

    def _adapters_of(self, rows: Sequence[RunningSequence]) -> Sequence[RowsOfAdapters]:
        own = self._policy_adapter
        chosen = [own if row.owner.adapter is None else row.owner.adapter.weights for row in rows]
        return self._stacks.rows(chosen, self._device, self._decoder.dtype)

    def _give(self, rows: Sequence[RunningSequence], sampled: SampledTokens, experts_RW: Tensor | None) -> None:
        experts = None if experts_RW is None else experts_RW.to(torch.int16).cpu().numpy()
        top = sampled.top_logprobs
        none: list[TokenLogprob] | None = None
        token_ids = sampled.token_ids_B.tolist()
        num_replayed = 0
        kinds: dict[tuple[int, int], int] = {}
        for i, (row, token_id, logprob) in enumerate(zip(rows, token_ids, sampled.logprobs, strict=True)):
            if row.constraint is not None and row.constraint.error is not None:
                self._fail(row, row.constraint.error)
            elif not math.isfinite(logprob):
                self._fail(row, self._not_finite(row))
            elif row.is_replaying:
                row.step_on()
                num_replayed += 1
            elif not row.has_ended:
                version = self.version if row.owner.adapter is None else row.owner.adapter.unit[1]
                if experts is not None:
                    row.choice.experts.append(experts[i])
                row.add(token_id, logprob, version, top.get(i, none) if top else none)
                kind = kinds.get((row.kin, token_id))
                if kind is None:
                    kind = kinds[row.kin, token_id] = next(self._kinds)
                row.kin = kind
        self.totals.sampled_tokens += len(rows) - num_replayed

    def _not_finite(self, row: RunningSequence) -> MettleError:
        name, version = row.owner.unit(self.version)
        policy = f"{name} version {version}" if name else f"version {version}"
        return ServiceError(f"the weights of {policy} gave a log-probability that is not finite")

    def _fail(self, row: RunningSequence, error: MettleError) -> None:
        # What is not finite must not stay in a slot: the next sequence there would multiply it by 0 and get NaN.
        if (found := self._slots.find(row)) is not None:
            owner, index = found
            owner.clear(index)
        row.owner.fail(error)
        self._requests.pop(row.owner.request.request_id, None)
        self._admission.forget(row.owner)
        for choice in row.owner.choices:
            if choice.finish_reason is None:
                row.owner.end_choice(choice, "abort")

    def _settle(self, rows: Sequence[RunningSequence]) -> None:
        """Give back the slots of those of `rows` that have ended, and tell their listeners."""
        ended = [row for row in rows if row.has_ended]
        if not ended:
            return
        if self.limits.is_reusing_sampled:
            self._keep(ended)
        self._free_ended()
        owners = {id(row.owner): row.owner for row in ended if row.owner.num_open == 0}
        for owner in owners.values():  # last, so that who hears of the end finds the slots free
            self._finish(owner)

    def _keep(self, ended: Sequence[RunningSequence]) -> None:
        # What one version computed and sampled, for prompts that begin with it.
        for row in ended:
            unit, found = row.owner.unit(self.version), self._slots.find(row)
            if found is not None and row.is_pure and set(row.choice.versions) == {unit[1]} and not row.has_failed:
                length = row.length - 1  # the newest token has no keys yet
                kv_LKTE = found[0].take(found[1], length)[0]
                self.memory.prefixes.insert(unit, [*row.prompt_ids, *row.sampled_ids][:length], kv_LKTE)

    def _free_ended(self) -> None:
        self._slots.drop_ended()
        self._batch = None
        self._admission.has_room = True

    def _finish(self, under_way: RunningRequest) -> None:
        self._requests.pop(under_way.request.request_id, None)
        under_way.finish()

    def _drop_unwanted_prompts(self) -> None:
        for batch in [batch for batch in self._prompts if not any(prompt.is_wanted for prompt in batch.prompts)]:
            self._prompts.remove(batch)
            self.memory.promised -= batch.promised


class _StepBatch:
    """The running sequences in the order of their slots, with their newest tokens and where these stand."""

    def __init__(self, rows: list[RunningSequence], device: torch.device) -> None:
        self.rows = rows
        self.plan = SamplingPlan(rows, device)
        self.adapters: Sequence[RowsOfAdapters] = ()
        self.token_ids = torch.tensor([row.newest for row in rows], device=device)
        self.positions = torch.tensor([row.length - 1 for row in rows], device=device)
        self._replaying = [i for i, row in enumerate(rows) if row.is_replaying]

    def kin(self) -> Kin | None:
        """One row of each kind, where there are so many fewer kinds than rows that it pays to tell them apart."""
        _, first_U, which_B = np.unique([row.kin for row in self.rows], return_index=True, return_inverse=True)
        if len(first_U) > WORTHWHILE * len(self.rows):
            return None
        order = np.argsort(first_U)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        device = self.token_ids.device
        return Kin(torch.from_numpy(first_U[order]).to(device), torch.from_numpy(place[which_B]).to(device))

    def step_on(self, sampled_B: Tensor) -> None:
        """To the tokens that were just sampled, or were so before."""
        self.token_ids, self.positions = sampled_B, self.positions + 1
        if self._replaying:
            forced = [self.rows[i].newest for i in self._replaying]
            self.token_ids[self._replaying] = torch.tensor(forced, device=sampled_B.device)
            if not all(self.rows[i].is_replaying for i in self._replaying):
                # Somebody has caught up, and samples from now on.
                self.plan = SamplingPlan(self.rows, sampled_B.device)
                self._replaying = [i for i in self._replaying if self.rows[i].is_replaying]


def _noise(request: GenerationRequest, index: int) -> np.random.Generator | None:
    if request.seeds:
        return choice_noise(request.seeds[index], 0)
    return None if request.params.seed is None else choice_noise(request.params.seed, index)
