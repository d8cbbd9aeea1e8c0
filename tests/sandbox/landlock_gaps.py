"""What stays open to an attack where Landlock is all there is, and why that is accepted; all others are contained."""

from __future__ import annotations

OPEN_ALONE = {
    "reads what the host calls itself": "only a namespace hides the host's name",
    "could regain a capability": "the bound is its user's own, and no program can give it anything (no new privileges)",
}
