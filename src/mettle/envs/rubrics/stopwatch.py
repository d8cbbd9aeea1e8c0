"""How long a call holds its thread up, on a host that may have other things to do.

By the clock a call of microseconds takes tens of milliseconds when the host gives the processor to somebody else in the
middle of it. That is no fault of the call, and nothing that another thread would mend. So a call that looks long is
measured by its own processor time, unless it let go of the processor by itself: then it waited for something, and all
of its time counts.

Parts: `Used` (what a thread has used until a moment), `held_s`. Invariant: a call that waits is never measured as
quicker than it is.
"""

from __future__ import annotations

from typing import NamedTuple

try:
    import resource

    _WHO: int | None = getattr(resource, "RUSAGE_THREAD", None)
except ImportError:  # this system has no such figures
    _WHO = None

SHORT_S = 0.001
"""Nobody asks whose fault a call is that is shorter."""


class Used(NamedTuple):
    """Seconds of the processor that a thread has used, and how often it has let go of it by itself."""

    cpu_s: float = 0.0
    num_waits: int = -1


def used() -> Used:
    """By this thread, until now. Asking takes a microsecond: ask once before many calls."""
    if _WHO is None:
        return Used()
    found = resource.getrusage(_WHO)
    return Used(found.ru_utime + found.ru_stime, found.ru_nvcsw)


def held_s(wall_s: float, before: Used) -> float:
    """Seconds in which a call of `wall_s` that has just ended held its thread up; `before` it the thread had used that.

    Whatever else the thread has done since counts as the call's.
    """
    if wall_s < SHORT_S or _WHO is None:
        return wall_s
    now = used()
    return min(wall_s, now.cpu_s - before.cpu_s) if now.num_waits == before.num_waits else wall_s
