"""What fits an engine, and which requests can never run there. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mettle.inference.engine.protocol import GenerationRequest, RequestRefused

MIN_TEMPERATURE: Final = 1e-5
"""Above 0, which is greedy: logits divided by less than this are no float32."""
MAX_TOP_K: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What fits: see InferenceConfig."""

    max_slots: int
    max_model_len: int
    max_prefill_tokens: int = 8192
    kv_cache_bytes: int | None = None
    kv_cache_share: float = 0.25
    max_adapters: int = 16
    max_adapter_versions: int = 4
    is_reusing_sampled: bool = False
    is_recording_experts: bool = False


def check_request(
    request: GenerationRequest,
    limits: Limits,
    vocab_size: int,
    *,
    keeps_grammars: bool = False,
    draws_again: bool = False,
) -> None:
    """The rules that every engine has for a request; one that keeps to no grammars, or cannot draw again, refuses that.

    Raises: RequestRefused.
    """
    prompt_ids, params = request.prompt_ids, request.params
    if not prompt_ids:
        raise RequestRefused("the prompt has no tokens", "prompt_ids")
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        raise RequestRefused(f"token ids must be from 0 to {vocab_size - 1}", "prompt_ids")
    room = limits.max_model_len - len(prompt_ids)
    if room < (0 if params.max_tokens == 0 else 1):
        message = f"the prompt has {len(prompt_ids)} tokens and the context holds {limits.max_model_len}"
        raise RequestRefused(message, "prompt_ids", "context_length_exceeded")
    if not 1 <= request.n <= limits.max_slots:
        raise RequestRefused(f"n must be from 1 to {limits.max_slots}, not {request.n}", "n")
    if request.seeds and len(request.seeds) != request.n:
        raise RequestRefused(f"seeds has {len(request.seeds)} entries for {request.n} choices", "seeds")
    if 0 < params.temperature < MIN_TEMPERATURE:
        message = f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, not {params.temperature:g}"
        raise RequestRefused(message, "temperature")
    if any(not 0 <= token_id < vocab_size for token_id, _ in params.logit_bias):
        raise RequestRefused(f"logit_bias may name token ids from 0 to {vocab_size - 1}", "logit_bias")
    if params.constraint is not None and not keeps_grammars:
        raise RequestRefused("this engine keeps to no grammar", params.constraint.field)
    if (redraw := request.redraw) is not None:
        if not draws_again:
            raise RequestRefused("this engine does not draw again what was drawn", "redraw")
        if not (1 <= redraw.start <= len(prompt_ids) and redraw.temperature >= 0):
            raise RequestRefused("a redraw is of tokens after the first, at a temperature of 0 or more", "redraw")
    if params.top_k > MAX_TOP_K:
        raise RequestRefused(f"top_k must be from -1 to {MAX_TOP_K}", "top_k")
