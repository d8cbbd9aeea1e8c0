"""Pieces that chat and completions answers have in common: usage, sampled ids, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mettle.clients.renderer import Renderer
from mettle.inference.engine.protocol import Choice, Generation, TokenLogprob


def usage(num_prompt_tokens: int, generations: Sequence[Generation]) -> dict[str, int]:
    """Token counts; a prompt counts once however many choices it has."""
    completion = sum(len(choice.token_ids) for g in generations for choice in g.choices)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": num_prompt_tokens + completion,
    }


def token_fields(choice: Choice) -> dict[str, Any]:
    """What `return_token_ids` adds to a choice."""
    return {"token_ids": choice.token_ids, "versions": choice.versions}


def chat_logprobs(
    renderer: Renderer, token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Sequence[TokenLogprob]]
) -> dict[str, Any]:
    """`logprobs` of a chat choice, or of a part of one."""
    content = []
    for position, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        alternatives = top[position] if position < len(top) else []
        entry = _chat_entry(renderer, token_id, logprob)
        entry["top_logprobs"] = [_chat_entry(renderer, other.token_id, other.logprob) for other in alternatives]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(renderer: Renderer, token_id: int, logprob: float) -> dict[str, Any]:
    text = renderer.token_text(token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": renderer.token_bytes(token_id)}


def finite(logprob: float) -> float:
    """JSON has no infinity; a token outside the support gets a number that no real one has."""
    return logprob if logprob > -9999.0 else -9999.0
