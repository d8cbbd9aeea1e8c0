"""What one attack of the safety suite is: source that prints BREACH if it got through, and what must be true then.

Each is given, on its standard input, a JSON object that describes what was planted on the host for it (see
`planted.py`). Where an attack succeeds it does no harm: it touches only what was planted, or undoes what it did.
Invariant: every attack says what must be true on the host afterwards, and either that it gets through where nothing
isolates it, or why it does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

PRELUDE = """
import ctypes, errno, json, os, socket, sys
host = json.loads(sys.stdin.readline())
libc = ctypes.CDLL(None, use_errno=True)
def breach(*words): print("BREACH", *words, flush=True)
def call(*arguments):
    ctypes.set_errno(0)
    passed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(*passed)
    return result, ctypes.get_errno()
def answered(*arguments):
    result, error = call(*arguments)
    return result >= 0 or error not in (errno.EPERM, errno.EACCES, errno.ENOSYS)
def works(attempt, *arguments):
    try:
        attempt(*arguments)
        return True
    except (OSError, ValueError, RuntimeError, MemoryError):
        return False
"""


@dataclass(frozen=True)
class Attack:
    """One attack.

    `must`: what must be true on the host afterwards. `opens`: on which pool without isolation it gets through, which
    proves that its check can fail: "any", "root" (only where the pool belongs to root), or "" (then `off` says why).
    `is_harmful` ones are never run without isolation. `first` is run beforehand, as another solution or machine.
    """

    name: str
    code: str
    opens: Literal["any", "root", ""] = "any"
    is_harmful: bool = False
    first: str = ""
    must: str = ""
    off: str = ""

    def gets_through(self, *, is_root: bool) -> bool:
        """Whether it is to succeed on a pool without isolation."""
        return not self.is_harmful and (self.opens == "any" or (self.opens == "root" and is_root))

    def why_not_off(self, *, is_root: bool) -> str:
        """Why it does not succeed without isolation; empty if it does."""
        if self.gets_through(is_root=is_root):
            return ""
        return self.off or "an ordinary user of the host may not do it either"


def group(must: str, attacks: Iterable[Attack]) -> list[Attack]:
    """Attacks of which the same must be true afterwards, unless they say otherwise."""
    return [attack if attack.must else replace(attack, must=must) for attack in attacks]
