"""Workers that lie, each in one way, with real engines, and when they are found.

    python tests/inference/outside/liars.py [--seeds 20] [--json FILE]

What a liar returns has the form of an honest answer, and mostly the right logprobs. Each answer is a group of 8
completions of at most 16 tokens of one prompt, under a tiny model whose next token has an entropy of about 2 nats
(`plain`) or .3 (`sharp`). The table says how many answers of a liar were taken for honest before one was not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `policies` and `schedulers`

import torch
from policies import END, make_model, tiny_config
from schedulers import make_scheduler
from transformers import PreTrainedModel

from mettle.inference.engine.local import run_requests
from mettle.inference.engine.protocol import Choice, FinishReason, GenerationRequest
from mettle.inference.engine.scheduler import Scheduler
from mettle.inference.outside.checks import (
    AUDIT_TOLERANCES,
    AuditBounds,
    WorkFault,
    audit_fault,
    audit_request,
    chosen_for_audit,
    form_fault,
)
from mettle.records.sampling import SamplingParams

GROUP = 8
MAX_TOKENS = 16
BOUNDS = AuditBounds(AUDIT_TOLERANCES["float32"])


def sampled(engine: Scheduler, request: GenerationRequest) -> list[Choice]:
    """What an honest worker says."""
    (found,) = run_requests(engine, [dataclasses.replace(request, may_lag=False)])
    return list(found.choices)


def scored(engine: Scheduler, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
    """The logprobs of tokens under an engine's own weights."""
    whole = [*prompt_ids, *token_ids]
    request = GenerationRequest("score", whole, SamplingParams(max_tokens=0), prompt_logprobs=True)
    (found,) = run_requests(engine, [request])
    assert found.prompt_logprobs is not None
    return [value for value in found.prompt_logprobs[len(prompt_ids) :] if value is not None]


class Lies:
    """Ways to lie. `honest` has the run's weights, `older` those of a step before, `other` another model's."""

    def __init__(self, honest: Scheduler, other: Scheduler, older: Scheduler, seed: int) -> None:
        self.honest, self.other, self.older, self.end = honest, other, older, END
        self.rng = random.Random(seed)
        self._kept: list[list[int]] = []

    def honest_answer(self, request: GenerationRequest) -> list[Choice]:
        """No lie."""
        return sampled(self.honest, request)

    def other_model(self, request: GenerationRequest) -> list[Choice]:
        """Another model's tokens, and its logprobs."""
        return sampled(self.other, request)

    def other_model_scored(self, request: GenerationRequest) -> list[Choice]:
        """Another model's tokens with the logprobs that the right one has for them."""
        return [self._scored(request, choice) for choice in sampled(self.other, request)]

    def older_version(self, request: GenerationRequest) -> list[Choice]:
        """What weights draw that are one small step older."""
        return sampled(self.older, request)

    def greedy(self, request: GenerationRequest) -> list[Choice]:
        """The likeliest tokens, with the right logprobs."""
        params = dataclasses.replace(request.params, temperature=0.0)
        found = sampled(self.honest, dataclasses.replace(request, params=params, seeds=()))
        return [self._scored(request, choice) for choice in found]

    def cooler(self, request: GenerationRequest) -> list[Choice]:
        """Drawn at temperature .9 where it is 1, with the right logprobs."""
        params = dataclasses.replace(request.params, temperature=0.9 * request.params.temperature)
        found = sampled(self.honest, dataclasses.replace(request, params=params))
        return [self._scored(request, choice) for choice in found]

    def changed_logprobs(self, request: GenerationRequest) -> list[Choice]:
        """The right tokens; their logprobs half a percent higher."""
        found = sampled(self.honest, request)
        for choice in found:
            choice.logprobs = [0.995 * logprob for logprob in choice.logprobs]
        return found

    def copied(self, request: GenerationRequest) -> list[Choice]:
        """Completions of an earlier request, with the right logprobs here."""
        if not self._kept:
            first = dataclasses.replace(request, seeds=tuple(self.rng.getrandbits(40) for _ in request.seeds))
            self._kept = [choice.token_ids for choice in sampled(self.honest, first)]
        ends = [self._ended(request, list(ids)) for ids in self._kept[: request.n]]
        return [self._scored(request, dataclasses.replace(end, index=i)) for i, end in enumerate(ends)]

    def cut_short(self, request: GenerationRequest) -> list[Choice]:
        """Ended after half of the tokens by an end token that was not drawn, with the right logprobs."""
        found = sampled(self.honest, request)
        halves = [[*choice.token_ids[: max(1, len(choice.token_ids) // 2)], self.end] for choice in found]
        ends = [self._ended(request, half) for half in halves]
        return [self._scored(request, dataclasses.replace(end, index=i)) for i, end in enumerate(ends)]

    def best_of_two(self, request: GenerationRequest) -> list[Choice]:
        """Of two honest draws the likelier one, with the right logprobs."""
        again = dataclasses.replace(request, seeds=tuple(self.rng.getrandbits(40) for _ in request.seeds))
        pairs = zip(sampled(self.honest, request), sampled(self.honest, again), strict=True)
        return [max(pair, key=lambda choice: sum(choice.logprobs) / len(choice.logprobs)) for pair in pairs]

    def one_in_eight(self, request: GenerationRequest) -> list[Choice]:
        """Honest, but for one completion of the group, which is greedy."""
        found, lie = sampled(self.honest, request), self.greedy(request)
        place = self.rng.randrange(len(found))
        found[place] = lie[place]
        return found

    def _ended(self, request: GenerationRequest, token_ids: list[int]) -> Choice:
        limit = request.params.max_tokens or len(token_ids)
        if self.end in token_ids:
            token_ids = token_ids[: token_ids.index(self.end) + 1]
        reason: FinishReason = "stop" if token_ids[-1] == self.end else "length"
        if reason == "length":
            token_ids = (token_ids * limit)[:limit]
        return Choice(0, token_ids, finish_reason=reason)

    def _scored(self, request: GenerationRequest, choice: Choice) -> Choice:
        return dataclasses.replace(choice, logprobs=scored(self.honest, request.prompt_ids, choice.token_ids))


KINDS = (
    "other_model", "other_model_scored", "older_version", "greedy", "cooler", "changed_logprobs", "copied",
    "cut_short", "best_of_two",
)  # fmt: skip


def a_step_older(model: PreTrainedModel, size: float = 1e-3) -> PreTrainedModel:
    """The model before a step of Adam at a learning rate of `size`, whose signs are drawn."""
    older = make_model(model.config)
    older.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in older.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator).sign()
    return older


def sharpened(model: PreTrainedModel, factor: float = 3.0) -> PreTrainedModel:
    """The model with logits so many times as large."""
    sharp = make_model(model.config)
    sharp.load_state_dict(model.state_dict())
    with torch.no_grad():
        sharp.model.norm.weight *= factor
    return sharp


def liar_of(model: PreTrainedModel, seed: int) -> Lies:
    """A liar with engines of its own."""
    models = (model, make_model(tiny_config(), seed=seed + 100), a_step_older(model))
    return Lies(*(make_scheduler(one, eos_token_ids=(END,)) for one in models), seed)


def group_request(seed: int, number: int) -> GenerationRequest:
    """One group, its prompt and seeds drawn from a seed and a number."""
    rng = random.Random(f"{seed}/{number}")
    prompt = [rng.randrange(32, 127) for _ in range(6)]
    seeds = tuple(rng.getrandbits(60) for _ in range(GROUP))
    return GenerationRequest(f"g{number}", prompt, SamplingParams(max_tokens=MAX_TOKENS), n=GROUP, seeds=seeds)


def found_in(
    trusted: Scheduler,
    request: GenerationRequest,
    choices: Sequence[Choice],
    share: float,
    rng: random.Random,
    bounds: AuditBounds = BOUNDS,
) -> WorkFault | None:
    """What the checks of a run say of an answer."""
    fault = form_fault(
        request, choices, vocab_size=264, max_model_len=200, eos_token_ids=frozenset({END}), decode_text=None
    )
    if fault is not None:
        return fault
    chosen = [choices[place] for place in chosen_for_audit(len(choices), share, rng)]
    again = run_requests(trusted, [audit_request(f"a{c.index}", request, c) for c in chosen])
    faults = [audit_fault(c, g.redrawn or [], bounds) for c, g in zip(chosen, again, strict=True)]
    return next((one for one in faults if one is not None), None)


def answers_before_found(model: PreTrainedModel, kind: str, seed: int, share: float, most: int = 200) -> int:
    """The number of the first answer of a liar that is refused; `most` + 1 where none of so many is."""
    liar, trusted, rng = (
        liar_of(model, seed),
        make_scheduler(model, eos_token_ids=(END,)),
        random.Random(f"check {seed}"),
    )
    for number in range(1, most + 1):
        request = group_request(seed, number)
        if found_in(trusted, request, getattr(liar, kind)(request), share, rng) is not None:
            return number
    return most + 1


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    plain = make_model(tiny_config())
    rows = []
    for name, model in (("plain", plain), ("sharp", sharpened(plain))):
        for kind, share in [(k, s) for k in KINDS for s in (1.0, 1 / GROUP)] + [
            ("one_in_eight", s) for s in (1.0, 0.5, 1 / GROUP)
        ]:
            found = [answers_before_found(model, kind, seed, share) for seed in range(arguments.seeds)]
            rows.append(
                {
                    "model": name,
                    "kind": kind,
                    "share": share,
                    "seeds": len(found),
                    "min": min(found),
                    "median": statistics.median(found),
                    "mean": statistics.fmean(found),
                    "max": max(found),
                }
            )
            print(*(f"{value:.3g}" if isinstance(value, float) else value for value in rows[-1].values()), flush=True)
        honest = [answers_before_found(model, "honest_answer", seed, 1.0, most=10) for seed in range(arguments.seeds)]
        print(name, "honest: refused", sum(n <= 10 for n in honest), "of", 10 * len(honest), "answers", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
