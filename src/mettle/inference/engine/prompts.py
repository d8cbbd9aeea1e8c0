"""Prompts on their way into the cache: those of one length together, so many tokens a step.

A `PromptBatch` computes prompts of the same number of blocks in one pass, or a long one in chunks between which the
running sequences go on. Equal prompts are computed once, whoever sent them, and what the cache knows of a prompt is not
computed at all. Invariant: a prompt's numbers depend on its tokens and the weights alone, whatever it was computed with
and wherever it was cut; see `attention.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mettle.inference.engine.adapters import AdapterWeights, head_rows
from mettle.inference.engine.attention import BLOCK
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.prefixes import Unit, as_prompt
from mettle.inference.engine.protocol import TokenLogprob
from mettle.inference.engine.sampler import Redrawing
from mettle.inference.engine.sequences import RunningRequest, RunningSequence
from mettle.inference.engine.served_adapters import ChosenAdapter

_LOGIT_ROWS = 1024


@dataclass(slots=True)
class AdmittedPrompt:
    """One prompt under one adapter and version, those who sent it, and which of their choices it is computed for.

    `pages` is what is known of it; `promised` bytes are set aside for it and for the slots of its sequences.
    """

    token_ids: tuple[int, ...]
    unit: Unit
    pages: list[Tensor]
    owners: list[RunningRequest] = field(default_factory=list)
    sequences: list[RunningSequence] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    alternatives: list[list[TokenLogprob]] = field(default_factory=list)
    redrawn: dict[str, Redrawing] = field(default_factory=dict)
    promised: int = 0

    @property
    def is_scored(self) -> bool:
        """True when someone wants log-probabilities of the prompt itself."""
        return any(owner.request.prompt_logprobs for owner in self.owners)

    @property
    def is_drawn_again(self) -> bool:
        """True when someone wants a part of it drawn again."""
        return any(owner.request.redraw is not None for owner in self.owners)

    @property
    def num_alternatives(self) -> int:
        """Most that someone wants to know at each of its tokens."""
        return max(o.request.top_logprobs if o.request.prompt_logprobs else 0 for o in self.owners)

    def redrawn_of(self, owner: RunningRequest) -> Redrawing:
        """What is drawn again for one of those who sent it."""
        redraw = owner.request.redraw
        assert redraw is not None, "it was asked for"
        return self.redrawn.setdefault(owner.request.request_id, Redrawing(redraw))

    @property
    def is_wanted(self) -> bool:
        """False when all who sent it have gone."""
        return any(owner.num_open and not owner.is_settled for owner in self.owners)

    @property
    def adapter(self) -> ChosenAdapter[AdapterWeights] | None:
        """The adapter that it is computed under; all who sent it chose the same."""
        return self.owners[0].adapter

    @property
    def start(self) -> int:
        """The first position that is computed."""
        return len(self.pages) * BLOCK


class PromptBatch:
    """Prompts with the same blocks to compute, whatever their adapters."""

    def __init__(self, decoder: Decoder, prompts: Sequence[AdmittedPrompt]) -> None:
        self.prompts = list(prompts)
        self.promised = sum(prompt.promised for prompt in prompts)
        self.is_pure = True  # all of it was computed with the weights of the prompts' units
        self._longest = max(len(prompt.token_ids) for prompt in prompts)
        self._at = prompts[0].start
        self._device = decoder.device
        rows = [[*prompt.token_ids, *([0] * (self._longest - len(prompt.token_ids)))] for prompt in prompts]
        self._token_ids = torch.tensor(rows, device=self._device)
        self.kv_NLKTE = decoder.prompt_room(len(prompts), self._longest)
        for i, prompt in enumerate(prompts):
            if prompt.pages:
                self.kv_NLKTE[i, :, :, : self._at] = as_prompt(prompt.pages)
        self.last_ND: Tensor | None = None
        self.adapters: Sequence[AdapterWeights | None] = ()
        """Those that the newest tokens were computed under, by prompt."""
        self.last_experts_NW: Tensor | None = None
        """What routers chose for the last tokens, where that is asked for."""

    @property
    def sequences(self) -> list[RunningSequence]:
        """The choices that wait for it and have not been ended meanwhile."""
        return [row for prompt in self.prompts for row in prompt.sequences if not row.has_ended]

    @property
    def age(self) -> tuple[int, int]:
        """That of the youngest that waits for it."""
        owners = max((owner.arrival, 0) for prompt in self.prompts for owner in prompt.owners)
        return max((row.age for row in self.sequences), default=owners)

    @property
    def num_left(self) -> int:
        """Tokens still to compute, padding included."""
        return (self._longest - self._at) * len(self.prompts)

    def compute(
        self,
        decoder: Decoder,
        num_tokens: int,
        policy_adapter: AdapterWeights | None = None,
        *,
        is_recording_experts: bool = False,
    ) -> int:
        """Compute about `num_tokens` more, but at least a block of each prompt; the number computed.

        Prompts that chose no adapter are computed under the policy's own, if it has one.
        """
        num_prompts = len(self.prompts)
        length = max(BLOCK, num_tokens // num_prompts // BLOCK * BLOCK)
        end = min(self._longest, self._at + length)
        self.adapters = [policy_adapter if p.adapter is None else p.adapter.weights for p in self.prompts]
        routes: list[Tensor] | None = [] if is_recording_experts and end == self._longest else None
        needs_all = routes is not None or any(p.is_scored or p.is_drawn_again for p in self.prompts)
        # All of them end in the same block.
        since = 0 if needs_all else (self._longest - 1) // BLOCK * BLOCK
        token_ids = self._token_ids[:, self._at : end]
        hidden_NPD = decoder.prefill(token_ids, self.kv_NLKTE, self._at, self.adapters, routes, since)
        for i, prompt in enumerate(self.prompts):
            if prompt.is_scored or prompt.is_drawn_again:
                # The hidden state of a token says how likely the one after it was.
                stop = min(end, len(prompt.token_ids) - 1)
                targets = self._token_ids[i, self._at + 1 : stop + 1]
                before, adapter = hidden_NPD[i, : len(targets)], self.adapters[i]
                if number := prompt.num_alternatives:
                    scores, tops = likeliest_tokens(decoder, targets, before, number, adapter)
                    prompt.scores += scores
                    prompt.alternatives += tops
                elif prompt.is_scored:
                    prompt.scores += score_tokens(decoder, targets, before, adapter).tolist()
                for owner in prompt.owners:
                    if owner.request.redraw is not None:
                        redraw_tokens(decoder, prompt.redrawn_of(owner), targets, before, self._at + 1, adapter)
        if end == self._longest:
            given = max(self._at, since)
            ends = torch.tensor([len(prompt.token_ids) - 1 - given for prompt in self.prompts])
            self.last_ND = hidden_NPD[torch.arange(num_prompts), ends]
            if routes is not None:
                rows = torch.arange(num_prompts) * (end - given) + ends
                self.last_experts_NW = torch.cat(routes, -1)[rows.to(self._device)]
        computed = (end - self._at) * num_prompts
        self._at = end
        return computed


def batches_of(prompts: Sequence[AdmittedPrompt]) -> list[list[AdmittedPrompt]]:
    """Prompts that are computed together: those that begin and end in the same blocks."""
    found: dict[tuple[int, int], list[AdmittedPrompt]] = {}
    for prompt in prompts:
        found.setdefault((prompt.start, (len(prompt.token_ids) - 1) // BLOCK), []).append(prompt)
    return list(found.values())


def score_tokens(
    decoder: Decoder, targets_P: Tensor, hidden_PD: Tensor, adapter: AdapterWeights | None = None
) -> Tensor:
    """Log-probabilities [P] of tokens under the hidden states before them and an adapter, at temperature 1."""
    parts = [own for own, _ in _scores(decoder, targets_P, hidden_PD, adapter)]
    return torch.cat(parts) if parts else hidden_PD.new_zeros(0)


def likeliest_tokens(
    decoder: Decoder, targets_P: Tensor, hidden_PD: Tensor, number: int, adapter: AdapterWeights | None = None
) -> tuple[list[float], list[list[TokenLogprob]]]:
    """The same, and with each token the `number` likeliest ones in its place."""
    scores: list[float] = []
    tops: list[list[TokenLogprob]] = []
    for own, logprobs in _scores(decoder, targets_P, hidden_PD, adapter):
        scores += own.tolist()
        values, ids = logprobs.topk(min(number, logprobs.shape[1]))
        tops += [list(map(TokenLogprob, *row)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
    return scores, tops


def redraw_tokens(
    decoder: Decoder,
    again: Redrawing,
    targets_P: Tensor,
    hidden_PD: Tensor,
    first: int,
    adapter: AdapterWeights | None = None,
) -> None:
    """Draw again those of the targets, the first of which is token `first` of the prompt, that were drawn."""
    for start in range(max(0, again.start - first), len(targets_P), _LOGIT_ROWS):
        targets = targets_P[start : start + _LOGIT_ROWS]
        again.take(_logits(decoder, hidden_PD[start : start + len(targets)], adapter), targets)


def _scores(
    decoder: Decoder, targets_P: Tensor, hidden_PD: Tensor, adapter: AdapterWeights | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Log-probabilities of some rows at a time: of the targets, and of all tokens."""
    for start in range(0, len(targets_P), _LOGIT_ROWS):
        targets = targets_P[start : start + _LOGIT_ROWS]
        logprobs = torch.log_softmax(_logits(decoder, hidden_PD[start : start + len(targets)], adapter), -1)
        yield logprobs.gather(1, targets[:, None])[:, 0], logprobs


def _logits(decoder: Decoder, hidden_PD: Tensor, adapter: AdapterWeights | None) -> Tensor:
    return decoder.logits(hidden_PD, head_rows([adapter], decoder.device, len(hidden_PD)))
