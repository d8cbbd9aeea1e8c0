"""What an answer of a worker must be to count. Pure: the trusted engine's numbers are given.

    form_fault    as many completions as asked, tokens and logprobs that can be, an end that the request has
    audit_fault   the same logprobs as here, and the very tokens that the seed draws from them

A completion has no freedom left: its tokens follow from weights, prompt and seed. Whoever samples from another model,
takes the likeliest token, copies, ends early or picks among several tries has other tokens than those, and whoever has
them has computed them. Legend: a fault is one line; None where there is none.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from mettle.errors import MettleError
from mettle.inference.engine.protocol import Choice, Generation, GenerationRequest, Redraw, RedrawnToken, TokenEvent
from mettle.inference.engine.sequences import DecodeText, RunningRequest, RunningSequence, ends_of
from mettle.records.sampling import SamplingParams

AUDIT_TOLERANCES: Final = {"float32": 1e-4, "bfloat16": 0.02}
"""Largest mean difference of a completion's logprobs: float32 shows 4e-6 at most, bfloat16 3e-4 to 7e-3."""
OF_ONE_TOKEN: Final = 20.0
"""How many times the mean's bound one token's difference, and its shortfall, may be."""
LIKELIEST: Final = 1e-3
"""What rounding may make of the logprob of a certain token."""
FaultKind = Literal["form", "logprobs", "tokens"]


@dataclass(frozen=True, slots=True)
class WorkFault:
    """What is wrong with an answer: at which check, and a line that says it."""

    kind: FaultKind
    text: str


@dataclass(frozen=True, slots=True)
class AuditBounds:
    """How far an honest worker's numbers may be from ours, in nats: on average over a completion, and at a token."""

    mean: float

    @property
    def token(self) -> float:
        return OF_ONE_TOKEN * self.mean


def form_fault(
    request: GenerationRequest,
    choices: Sequence[Choice],
    *,
    vocab_size: int,
    max_model_len: int,
    eos_token_ids: frozenset[int],
    decode_text: DecodeText | None,
) -> WorkFault | None:
    """Whether an answer could have been sampled at all."""
    if len(choices) != request.n or [choice.index for choice in choices] != list(range(request.n)):
        return WorkFault("form", f"{len(choices)} completions where {request.n} were asked for")
    for choice in choices:
        length = len(choice.token_ids)
        if not length or length != len(choice.logprobs):
            text = f"completion {choice.index} has {length} tokens and {len(choice.logprobs)} logprobs"
            return WorkFault("form", text)
        if not all(0 <= token_id < vocab_size for token_id in choice.token_ids):
            return WorkFault("form", f"completion {choice.index} has a token that is in no vocabulary")
        if not all(math.isfinite(logprob) and logprob <= LIKELIEST for logprob in choice.logprobs):
            return WorkFault("form", f"completion {choice.index} has a logprob that is none")
        if (wrong := _end_fault(request, choice, max_model_len, eos_token_ids, decode_text)) is not None:
            return WorkFault("form", wrong)
    return None


def _end_fault(
    request: GenerationRequest,
    choice: Choice,
    max_model_len: int,
    eos_token_ids: frozenset[int],
    decode_text: DecodeText | None,
) -> str | None:
    # The tokens go through what decides about ends in the engine itself.
    owner = RunningRequest(request, _NOBODY)
    max_tokens, stop_ids = ends_of(request, max_model_len, eos_token_ids)
    sequence = RunningSequence(owner, owner.choices[choice.index], max_tokens, stop_ids, None, decode_text)
    for place, token_id in enumerate(choice.token_ids):
        if sequence.has_ended:
            return f"completion {choice.index} goes on after its end at token {place} of {len(choice.token_ids)}"
        sequence.add(token_id, 0.0, 0, None)
    ended = sequence.choice
    if (ended.finish_reason, ended.stop) != (choice.finish_reason, choice.stop):
        said, is_so = _end(choice), _end(ended)
        return f"completion {choice.index} says that it ended by {said} after {len(choice.token_ids)} tokens: {is_so}"
    return None


def _end(choice: Choice) -> str:
    if choice.finish_reason is None:
        return "no end is there"
    return choice.finish_reason + (f" ({choice.stop!r})" if choice.stop else "")


def chosen_for_audit(num_choices: int, share: float, rng: random.Random) -> list[int]:
    """The completions of an answer that are computed again: at least one."""
    return sorted(rng.sample(range(num_choices), max(1, math.ceil(share * num_choices))))


def audit_request(request_id: str, request: GenerationRequest, choice: Choice) -> GenerationRequest:
    """What the trusted engine is asked about a completion."""
    seed = request.params.seed
    assert request.seeds or seed is not None, "a request that goes out has seeds"
    seed, index = (request.seeds[choice.index], 0) if request.seeds else (seed or 0, choice.index)
    redraw = Redraw(seed, index, len(request.prompt_ids), request.params.temperature)
    token_ids = [*request.prompt_ids, *choice.token_ids]
    params = SamplingParams(max_tokens=0)
    return GenerationRequest(request_id, token_ids, params, redraw=redraw)


def audit_fault(choice: Choice, redrawn: Sequence[RedrawnToken], bounds: AuditBounds) -> WorkFault | None:
    """Whether a completion is what the trusted engine draws, with the logprobs that it has there."""
    assert len(redrawn) == len(choice.token_ids), "every token was drawn again"
    apart = [abs(said - again.logprob) for said, again in zip(choice.logprobs, redrawn, strict=True)]
    mean, largest = math.fsum(apart) / len(apart), max(apart)
    if not (mean <= bounds.mean and largest <= bounds.token):
        text = f"its logprobs are {mean:.2g} off on average and {largest:.2g} at most; {bounds.mean:.2g} is allowed"
        return WorkFault("logprobs", f"completion {choice.index}: {text}")
    others = [place for place, again in enumerate(redrawn) if not again.shortfall <= bounds.token]
    if others:
        text = f"{len(others)} of {len(redrawn)} tokens are not those that the seed draws, the first at {others[0]}"
        return WorkFault("tokens", f"completion {choice.index}: {text}")
    return None


class _Nobody:
    def on_token(self, event: TokenEvent) -> None:
        return

    def on_finish(self, generation: Generation) -> None:
        return

    def on_failure(self, error: MettleError) -> None:
        return


_NOBODY: Final = _Nobody()
