"""Errors as they travel: `{"error": {"type": ..., "message": one line}}` with a status that fits, and back.

    type           status  raised by the client as
    user           400     UserError: the request can never work as it is
    token          401     TokenRefused
    no_machine     404     SandboxError: there is no such machine, and this service remembers none
    no_job         404     SandboxError: the machine has no such job
    no_route       404     UserError
    wrong_method   405     UserError
    machine_ended  410     MachineLost, with `why` (words) and `cause` (deleted, lifetime, idle, lease, ..., failure)
    stalled        408     SandboxError: the client sent nothing for too long in the middle of a body
    refused        403     UserError: the name in Host, or the page in Origin, is not one that is answered
    too_large      413     UserError, naming the limit
    os             422     OSError with the `errno` met inside the machine
    quota          429     QuotaExceeded, naming the quota
    checker        422  CheckerError: a task's checker failed, so that there is no verdict
    busy           429     ServiceBusy: the same request will do later, or elsewhere
    sandbox        500     SandboxError: the sandbox failed, the code is not to blame
    internal       500     SandboxError
    closing        503     ServiceBusy
    no_space       507     SandboxError: the service's own disk is full

Invariant: a message is one line that a terminal can show, without a traceback; a wrong token is told nothing else.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from typing import Any, Final

from mettle.errors import MettleError, SandboxError, UserError
from mettle.sandbox.judge.checkers import CheckerError
from mettle.sandbox.machines.endings import EndCause, EndReason, MachineLost, cause_of
from mettle.sandbox.service.messages import STATUSES
from mettle.wording import one_line

logger = logging.getLogger(__name__)

_MAX_MESSAGE: Final = 2000


class TokenRefused(UserError):
    """The service does not know the token, or was given none."""


class QuotaExceeded(SandboxError):
    """The token has as much as it may have."""


class ServiceBusy(SandboxError):
    """The service takes no more at the moment; the same request will do later, or elsewhere."""


class ServiceLost(SandboxError):
    """The service cannot be reached, or ended while it was at work."""


class NoService(ServiceLost):
    """None of the services answers, which says nothing of who asks."""


class NoMachine(SandboxError):
    """There is no such machine."""


class NoJob(SandboxError):
    """The machine has no such job."""


class TooLarge(UserError):
    """A body or a file over its limit."""


class NoSpace(SandboxError):
    """The service's own disk is full."""


KINDS: Final[dict[str, type[Exception]]] = {
    "user": UserError,
    "token": TokenRefused,
    "no_machine": NoMachine,
    "no_job": NoJob,
    "no_route": UserError,
    "wrong_method": UserError,
    "machine_ended": MachineLost,
    "too_large": TooLarge,
    "os": OSError,
    "checker": CheckerError,
    "quota": QuotaExceeded,
    "busy": ServiceBusy,
    "stalled": SandboxError,
    "refused": UserError,
    "sandbox": SandboxError,
    "internal": SandboxError,
    "closing": ServiceBusy,
    "no_space": NoSpace,
}
_OF_THE_SERVER: Final = ("no_route", "wrong_method", "internal", "closing", "stalled", "refused")
_TYPES: Final = [(kind, name) for name, kind in KINDS.items() if name not in _OF_THE_SERVER]
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def describe(error: Exception) -> dict[str, Any]:
    """The error as data."""
    body: dict[str, Any] = {"type": _type_of(error), "message": _line(str(error)) or type(error).__name__}
    if isinstance(error, OSError):
        number = error.errno or (errno.ETIMEDOUT if isinstance(error, TimeoutError) else errno.EIO)
        body |= {"errno": number, "strerror": error.strerror or os.strerror(number), "what": error.filename}
    elif isinstance(error, MachineLost):
        body |= {"why": _line(error.why), "cause": cause_of(error.why)}
    elif body["type"] == "internal":
        logger.error("a handler failed", exc_info=error)
    return body


def status_of(body: dict[str, Any]) -> int:
    """The HTTP status of an error described."""
    return STATUSES[body["type"]]


def rebuild(status: int, text: bytes) -> Exception:
    """The exception that an answer stands for, as the client raises it."""
    try:
        body = json.loads(text)["error"]
        name, message = str(body["type"]), _line(str(body["message"]))
        kind = KINDS[name]
        if kind is OSError:
            what = body.get("what")
            named = None if what is None else _line(str(what))
            return OSError(int(body["errno"]), _line(str(body["strerror"])), named)
        if kind is MachineLost:
            return MachineLost(
                message,
                why=EndReason(_line(str(body.get("why", ""))), EndCause(body.get("cause", EndCause.FAILURE))),
            )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return ServiceLost(f"the answer is not one of a sandbox service (status {status})")
    return kind(message)


def _type_of(error: Exception) -> str:
    # The most special type first: those that are derived from others stand before them here.
    ranked = sorted(_TYPES, key=lambda pair: -len(pair[0].__mro__))
    for kind, name in ranked:
        if isinstance(error, kind):
            return name
    return "sandbox" if isinstance(error, MettleError) else "internal"


def own_disk(error: OSError) -> Exception:
    """What an error of the service's own files is, as opposed to one inside a machine."""
    if error.errno in _FULL:
        return NoSpace(f"the disk of the sandbox service is full ({error.strerror}); nothing was changed")
    return SandboxError(f"the sandbox service could not keep a file: {error.strerror}")


def _line(text: str) -> str:
    """Of which no character steers a terminal: names of files in it are those of untrusted code."""
    return one_line(text, _MAX_MESSAGE)
