"""The verifiers names for what can go wrong in a rollout, and how a failure is written down.

Parts: the classes, `attributed` (any exception as one of ours), `error_data`, `ErrorChain`. Invariant: `Error` is
`mettle.errors.RolloutError`, so every failure that the rest of the lab attributes is a `vf.Error` too.
"""

from __future__ import annotations

import traceback
from typing import Any

from mettle.clients.errors import (
    AuthenticationError,
    EmptyModelResponseError,
    InvalidModelResponseError,
    ModelError,
    OverlongPromptError,
    RateLimitError,
)
from mettle.errors import EnvironmentFault, InfraError, JudgeError, RolloutError, RolloutTimeout, SandboxError

Error = RolloutError

RETRIED_ERRORS = (InfraError, InvalidModelResponseError)
"""What `max_retries` runs a rollout again for."""


class ToolError(EnvironmentFault):
    """A tool failed in a way that ends the rollout."""


class ToolParseError(ToolError):
    """The model's tool call could not be read."""


class ToolCallError(ToolError):
    """The tool raised."""


class TunnelError(InfraError):
    """The way back from a sandbox to this process broke."""


class ErrorChain:
    """An error and its causes; equal to another chain when the types are the same, in the same order."""

    def __init__(self, error: BaseException) -> None:
        self.errors: list[BaseException] = []
        current: BaseException | None = error
        while current is not None and current not in self.errors:
            self.errors.append(current)
            current = current.__cause__

    def __contains__(self, kind: type[BaseException]) -> bool:
        return any(isinstance(error, kind) for error in self.errors)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ErrorChain) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return " -> ".join(type(error).__name__ for error in self.errors)

    def __repr__(self) -> str:
        return " -> ".join(repr(error) for error in self.errors)


def attributed(error: Exception, kind: type[RolloutError], what: str) -> RolloutError:
    """`error` as a `RolloutError`: unchanged when it is one, else of `kind`, saying `what` was going on."""
    if isinstance(error, RolloutError):
        return error
    made = kind(f"{what}: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made


def error_data(error: BaseException) -> dict[str, Any]:
    """A failure as it is saved: type, message, chain of causes, and the boundary it was attributed to."""
    chain = ErrorChain(error)
    return {
        "error": type(error).__name__,
        "message": str(error),
        "error_chain_repr": repr(chain),
        "error_chain_str": str(chain),
        "kind": getattr(error, "kind", "rollout"),
    }


def error_trace(error: BaseException) -> str:
    """The whole traceback as text."""
    return "".join(traceback.format_exception(error))


__all__ = [
    "RETRIED_ERRORS",
    "AuthenticationError",
    "EmptyModelResponseError",
    "EnvironmentFault",
    "Error",
    "ErrorChain",
    "InfraError",
    "InvalidModelResponseError",
    "JudgeError",
    "ModelError",
    "OverlongPromptError",
    "RateLimitError",
    "RolloutTimeout",
    "SandboxError",
    "ToolCallError",
    "ToolError",
    "ToolParseError",
    "TunnelError",
    "attributed",
    "error_data",
    "error_trace",
]
