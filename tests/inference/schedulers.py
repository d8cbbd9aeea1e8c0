"""Schedulers of tiny models, requests, and a listener that keeps everything, for the engine's tests."""

from __future__ import annotations

from typing import Any

import torch

from mettle.errors import MettleError
from mettle.inference.engine.architecture import shape_from_config
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.limits import Limits
from mettle.inference.engine.protocol import Generation, GenerationRequest, TokenEvent
from mettle.inference.engine.scheduler import Scheduler
from mettle.inference.engine.weights import fuse
from mettle.records.sampling import SamplingParams

CPU = torch.device("cpu")


def make_scheduler(
    model: Any, *, max_slots: int = 8, max_model_len: int = 200, dtype: torch.dtype = torch.float32, **more: Any
) -> Scheduler:
    shape = shape_from_config(model.config.to_dict())
    decoder = Decoder(shape, fuse(shape, model.state_dict(), CPU, dtype), max_model_len)
    limits = Limits(
        max_slots,
        max_model_len,
        more.pop("max_prefill_tokens", 8192),
        kv_cache_bytes=more.pop("kv_cache_bytes", None),
        is_reusing_sampled=more.pop("is_reusing_sampled", False),
    )
    return Scheduler(decoder, limits, **{"seed": 0, **more})


def ask(request_id: str, prompt: list[int], n: int = 1, **params: Any) -> GenerationRequest:
    return GenerationRequest(request_id, prompt, SamplingParams(**{"max_tokens": 8, **params}), n)


class Heard:
    """A listener that keeps everything."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.generations: list[Generation] = []
        self.errors: list[MettleError] = []

    def on_token(self, event: TokenEvent) -> None:
        self.events.append(event)

    def on_finish(self, generation: Generation) -> None:
        self.generations.append(generation)

    def on_failure(self, error: MettleError) -> None:
        self.errors.append(error)


def sampled(generation: Generation) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of all choices, to be compared to the last bit."""
    return [(choice.token_ids, choice.logprobs) for choice in generation.choices]
