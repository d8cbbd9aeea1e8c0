"""The limits that this process itself is under, where they are too low for sandboxes.

A shell with `ulimit -u 12` gives its programs 12 processes; what fails then fails far from the cause. Whoever reports
such a failure adds `limits_hint`, so that it is looked for where it is.
"""

from __future__ import annotations

import os
import resource

GIB = 2**30
_LEAST = (
    (resource.RLIMIT_NPROC, "-u", 1, 256),
    (resource.RLIMIT_AS, "-v", 1024, 2 * GIB),
    (resource.RLIMIT_DATA, "-d", 1024, GIB),
    (resource.RLIMIT_FSIZE, "-f", 1024, GIB // 16),
    (resource.RLIMIT_NOFILE, "-n", 1, 256),
)
"""Limit, option of `ulimit`, its unit, and what a pool of sandboxes is sure to do with."""


def limits_hint() -> str:
    """` (this process is under ulimit -u 12: ...)`, or "" where no limit is that low."""
    found = []
    for kind, option, unit, least in _LEAST:
        soft = resource.getrlimit(kind)[0]
        is_free = soft == resource.RLIM_INFINITY or (kind == resource.RLIMIT_NPROC and os.geteuid() == 0)
        if not is_free and soft < least:
            found.append(f"ulimit {option} {soft // unit} (sandboxes want {least // unit})")
    return f"; this process is under {', '.join(found)}: raise it, or start from another shell" if found else ""
