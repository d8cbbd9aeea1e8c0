"""Errors. A rollout failure is attributed once, at the boundary it crossed, then recorded as data.

`UserError` is a person's mistake: one line, exit status 2. `RolloutError` is one rollout's failure: recorded on
the rollout, retried by policy, left out of its siblings' baseline, and never a reward of 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MettleError(Exception):
    """Base of every error that this package raises on purpose. A process that it ends exits with `exit_code`."""

    exit_code = 3


class UserError(MettleError):
    """Bad input. The message says what happened, with which value, and what to do."""

    exit_code = 2


class StorageError(MettleError):
    """The disk or the database refused: full, read-only, corrupt. Names the path and what is safe.

    A person has to act before it makes sense to go on, as with bad input.
    """

    exit_code = 2


class ServiceError(MettleError):
    """A process of a run cannot go on (a server is gone, a protocol was broken); the supervisor may restart it."""


class RolloutError(MettleError):
    """One rollout failed. `kind` is the word stored in the ledger and shown to people."""

    kind = "rollout"


class ProviderError(RolloutError):
    """The model endpoint failed or answered with something that is not an answer."""

    kind = "provider"


class EnvironmentFault(RolloutError):
    """The environment's own code raised."""

    kind = "environment"


class InfraError(RolloutError):
    """Something that the rollout ran on failed (a sandbox, a tunnel), so trying again may help."""

    kind = "sandbox"


class SandboxError(InfraError):
    """A sandbox could not be made or failed; the code inside is not to blame."""


class JudgeError(RolloutError):
    """A reward function or a judge model failed, so the rollout has no reward."""

    kind = "judge"


class RolloutTimeout(RolloutError):
    """The rollout used up its time."""

    kind = "timeout"


class OverlongError(RolloutError):
    """The conversation no longer fits the model's context."""

    kind = "overlong"


@contextmanager
def boundary(kind: type[RolloutError], what: str) -> Iterator[None]:
    """Attribute whatever escapes the block to `kind`; an already attributed error passes unchanged."""
    try:
        yield
    except RolloutError:
        raise
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {error}") from error
