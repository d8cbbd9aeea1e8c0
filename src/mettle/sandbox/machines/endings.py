"""Why a machine has ended: words for a person, with the cause for a program."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from mettle.errors import SandboxError


class EndCause(StrEnum):
    """What ended a machine."""

    DELETED = "deleted"
    LIFETIME = "lifetime"
    IDLE = "idle"
    LEASE = "lease"  # its client was not heard of
    LEFT = "left"  # its client said that it goes
    SHUTDOWN = "shutdown"
    FAILURE = "failure"


class EndReason(str):
    """The words, which know their cause."""

    cause: EndCause

    def __new__(cls, words: str, cause: EndCause) -> Self:
        made = super().__new__(cls, words)
        made.cause = cause
        return made


def cause_of(why: str) -> EndCause:
    """Of words that know none, the machine's own failure."""
    return why.cause if isinstance(why, EndReason) else EndCause.FAILURE


class MachineLost(SandboxError):
    """The machine ended, or stopped answering, before its answer came. `why` it ended, if that is known."""

    def __init__(self, message: str, *, why: str = "") -> None:
        super().__init__(message)
        self.why = why
