"""Sampling in the caller's own process and thread: what SFT warm-up and tests measure a policy with.

    generations = generate_batch(model.config.to_dict(), model.state_dict(), prompts, SamplingParams(max_tokens=8))

The weights are copied, so the model may train on while nothing is being sampled. No thread, no server, no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mettle.errors import MettleError
from mettle.inference.engine.decoders import make_decoder
from mettle.inference.engine.limits import Limits
from mettle.inference.engine.protocol import Generation, GenerationRequest, TokenEvent
from mettle.inference.engine.scheduler import Scheduler
from mettle.inference.engine.sequences import DecodeText
from mettle.records.sampling import SamplingParams


def generate_batch(
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    n: int = 1,
    eos_token_ids: Sequence[int] = (),
    version: int = 0,
    max_slots: int = 256,
    seed: int | None = None,
    decode_text: DecodeText | None = None,
    device: str | torch.device = "cpu",
) -> list[Generation]:
    """Sample `n` choices for each prompt and return the generations in the prompts' order.

    `config` is a Hugging Face config as a dict and `state` the state dict that goes with it. `params.seed` makes
    prompt i's choices repeatable whatever else is sampled; `seed` only the batch as a whole.
    Raises: UserError when the model is not one the engine serves; RequestRefused when a prompt does not fit.
    """
    longest = max((len(prompt) for prompt in prompts), default=1)
    needed = None if params.max_tokens is None else longest + max(params.max_tokens, 1)
    decoder = make_decoder(config, state, torch.device(device), torch.float32, needed)
    shape = decoder.shape
    room = shape.max_positions - longest if params.max_tokens is None else params.max_tokens
    limits = Limits(max(max_slots, n), min(shape.max_positions, longest + max(room, 1)))
    scheduler = Scheduler(
        decoder, limits, version=version, eos_token_ids=eos_token_ids, decode_text=decode_text, seed=seed
    )
    return run_requests(scheduler, [GenerationRequest(str(i), prompt, params, n) for i, prompt in enumerate(prompts)])


def run_requests(scheduler: Scheduler, requests: Sequence[GenerationRequest]) -> list[Generation]:
    """Step a scheduler until all requests have ended.

    Raises: RequestRefused before anything is sampled; ServiceError when the weights give no usable log-probabilities.
    """
    for request in requests:
        scheduler.check(request)
    collected = _Collected()
    for request in requests:
        scheduler.add(request, collected)
    while scheduler.step():
        pass
    if collected.error is not None:
        raise collected.error
    return [collected.generations[request.request_id] for request in requests]


class _Collected:
    """Keeps what finishes."""

    def __init__(self) -> None:
        self.generations: dict[str, Generation] = {}
        self.error: MettleError | None = None

    def on_token(self, event: TokenEvent) -> None:
        return

    def on_finish(self, generation: Generation) -> None:
        self.generations[generation.request_id] = generation

    def on_failure(self, error: MettleError) -> None:
        self.error = error
