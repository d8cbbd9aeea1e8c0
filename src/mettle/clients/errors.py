"""How a model call fails. Each is a `RolloutError`, so the rollout that made the call records it and nobody else fails.

Parts: `ModelError` and its kinds, `OverlongPromptError`; `refusal_of` (a status as an error), `one_line`. The names are
those of verifiers, so that an environment's `except vf.ModelError` keeps its meaning. Invariant: a message is one line
that names the URL, and the status where there was one.
"""

from __future__ import annotations

from mettle.errors import OverlongError, ProviderError


class ModelError(ProviderError):
    """The endpoint could not be reached or refused."""


class InvalidModelResponseError(ModelError):
    """The endpoint answered with something that is not an answer."""


class EmptyModelResponseError(InvalidModelResponseError):
    """The endpoint answered without text, reasoning or tool calls."""


class AuthenticationError(ModelError):
    """The endpoint refused the key (401) or the access (403)."""


class NotFoundError(ModelError):
    """The endpoint knows no such address or model (404)."""


class RateLimitError(ModelError):
    """The endpoint kept answering 429 until the retries were used up."""


class OverlongPromptError(OverlongError):
    """The conversation does not fit the model's context."""


OVERLONG_SIGNS = (
    "context length",
    "context_length",
    "maximum context",
    "prompt is too long",
    "prompt too long",
    "input is too long",
    "exceeds the maximum",
    "exceed context",
    "exceeds the available context",
    "max_model_len",
    "too many tokens",
    "reduce the length",
)


def is_overlong(body: str) -> bool:
    """True when the text of a 400 or 413 says that the prompt does not fit."""
    lowered = body.lower()
    return any(sign in lowered for sign in OVERLONG_SIGNS)


def refusal_of(request: str, status: int, reason: str, body: str) -> ModelError | OverlongPromptError:
    """An answer with an error status, as one of ours; `request` says what was asked of whom."""
    message = f"{request}: status {status}: {reason}"
    if status in (401, 403):
        return AuthenticationError(f"{message} (check the API key)")
    if status in (400, 413, 422) and is_overlong(body):
        return OverlongPromptError(message)
    if status == 404:
        return NotFoundError(f"{message} (check the model's name, and that the base URL ends in /v1)")
    return RateLimitError(message) if status == 429 else ModelError(message)


def one_line(text: str, limit: int = 300) -> str:
    """`text` without line breaks, cut at `limit` characters."""
    return " ".join(text[: 4 * limit].split())[:limit]
