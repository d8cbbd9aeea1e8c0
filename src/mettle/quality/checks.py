"""One question about an environment and its answer.

Parts: `Check`, `worst`. Invariant: a check that does not pass says what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["pass", "skip", "warn", "untested", "fail"]
ORDER: tuple[Status, ...] = ("pass", "skip", "warn", "untested", "fail")
"""From good to bad. `skip`: does not apply here. `untested`: applies, and could not be tried."""


@dataclass(frozen=True, slots=True)
class Check:
    """`name` is the question, `detail` what was found, `fix` what to do about it."""

    name: str
    status: Status
    detail: str
    fix: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON wants it."""
        return asdict(self)


def check(name: str, is_good: bool, detail: str, fix: str = "", *, otherwise: Status = "fail") -> Check:
    """A check that passes when `is_good`; `fix` is said only when it does not."""
    return Check(name, "pass" if is_good else otherwise, detail, "" if is_good else fix)


def worst(checks: Iterable[Check]) -> Status:
    """The status of all of them together."""
    found = [ORDER.index(each.status) for each in checks if each.status != "skip"]
    return ORDER[max(found, default=0)]
