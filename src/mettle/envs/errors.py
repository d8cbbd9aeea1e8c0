"""The verifiers names for what can go wrong in a rollout, and how a failure is written down.

Parts: the classes, `attributed` (any exception as one of ours), `error_data` and back, `ErrorChain`. Invariant:
`Error` is `mettle.errors.RolloutError`, so every failure that the rest of the lab attributes is a `vf.Error` too.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mettle.clients.errors import (
    AuthenticationError,
    EmptyModelResponseError,
    InvalidModelResponseError,
    ModelError,
    OverlongPromptError,
    RateLimitError,
)
from mettle.errors import (
    EnvironmentFault,
    InfraError,
    JudgeError,
    RolloutError,
    RolloutTimeout,
    SandboxError,
    UserError,
)

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


class BrowserSandboxError(SandboxError):
    """A browser's sandbox failed."""


class EnvironmentLoadError(UserError, RuntimeError):
    """An environment's own code failed while it, or its rows, were made. verifiers raises a RuntimeError then."""


def described_fault(error: BaseException, folder: Path | None = None) -> str:
    """What was raised, and the last line on the way to it that lies in `folder`, or in any file."""
    text = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if folder is None or Path(f.filename).resolve().is_relative_to(folder)]
    return f"{text} (line {own[-1].lineno} of {own[-1].filename})" if own else text


class ErrorChain:
    """An error and its causes; equal to another chain when the types are the same, in the same order."""

    def __init__(
        self,
        error: BaseException,
        build_error_chain: Callable[[BaseException], list[BaseException]] | None = None,
    ) -> None:
        self.root_error = error
        self.errors = (build_error_chain or get_error_chain)(error)

    @property
    def chain(self) -> list[BaseException]:
        """The errors, the outermost first."""
        return self.errors

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


def get_error_chain(error: BaseException | None, parent_type: type[BaseException] | None = None) -> list[BaseException]:
    """An error and its causes, up to the first that is no `parent_type`."""
    chain: list[BaseException] = []
    while error is not None and error not in chain and (parent_type is None or isinstance(error, parent_type)):
        chain.append(error)
        error = error.__cause__
    return chain


def get_vf_error_chain(error: BaseException) -> list[BaseException]:
    """An error and its causes, as far as they are `Error`s."""
    return get_error_chain(error, Error)


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
        "message": str(error) or type(error).__name__,
        "error_chain_repr": repr(chain),
        "error_chain_str": str(chain),
        "kind": getattr(error, "kind", "rollout"),
    }


error_info = error_data


def error_from_data(data: Mapping[str, Any]) -> RolloutError:
    """A saved failure as an error of the nearest type that is known here."""
    kinds: dict[str, type[RolloutError]] = {kind.__name__: kind for kind in (*NAMED_ERRORS, Error)}
    names = [str(data.get("error", "")), *str(data.get("error_chain_str", "")).split(" -> ")]
    kind = next((kinds[name] for name in names if name in kinds), Error)
    return kind(str(data.get("message") or data.get("error_chain_repr") or data.get("error", "")))


def is_error_data(value: object) -> bool:
    """Whether `value` is a saved failure."""
    wanted = ("error", "message", "error_chain_repr", "error_chain_str")
    return isinstance(value, Mapping) and all(isinstance(value.get(name), str) for name in wanted)


def error_trace(error: BaseException) -> str:
    """The whole traceback as text."""
    return "".join(traceback.format_exception(error))


NAMED_ERRORS: tuple[type[RolloutError], ...] = (
    BrowserSandboxError,
    SandboxError,
    TunnelError,
    InfraError,
    EmptyModelResponseError,
    InvalidModelResponseError,
    OverlongPromptError,
    ModelError,
    ToolParseError,
    ToolCallError,
    ToolError,
)
"""The failures that verifiers has names for, the narrower before the wider."""

__all__ = [
    "RETRIED_ERRORS",
    "AuthenticationError",
    "BrowserSandboxError",
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
    "error_from_data",
    "error_info",
    "error_trace",
    "get_error_chain",
    "get_vf_error_chain",
    "is_error_data",
]
