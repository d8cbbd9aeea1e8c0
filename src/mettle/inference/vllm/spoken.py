"""The tokens of one choice as vLLM speaks them: which weights sampled each, and which may be told already.

A version begins at a token's number, which vLLM's worker names at the moment of the exchange. Tokens of a version that
is not proven yet are held. Invariant: what was told has a version that was proven.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from mettle.inference.engine.protocol import TokenLogprob
from mettle.inference.engine.sequences import RunningSequence

_NAME = re.compile(r"(?:^(\d+)_)?.*?(mettle[0-9a-f]{32})")


class HeldToken(NamedTuple):
    """A token, its logprob, its version and its alternatives."""

    token_id: int
    logprob: float
    version: int
    top: list[TokenLogprob] | None


class SpokenChoice:
    """One choice of the request `name`, at `index` there; its first tokens are of `version`."""

    def __init__(self, sequence: RunningSequence, name: str, index: int, version: int, *, is_base: bool = True) -> None:
        self.sequence, self.name, self.index, self._is_base = sequence, name, index, is_base
        self.num_heard = 0
        self.held: list[HeldToken] = []
        self._starts = [(0, version)]

    def switch(self, version: int, counts: dict[tuple[str, int], int]) -> None:
        """Other weights came in when the requests known to the worker had `counts` tokens."""
        if not self._is_base:
            return  # its versions are its adapter's
        count = counts.get((self.name, self.index))
        if count is not None:
            self._starts.append((count, version))
        elif not self.num_heard:
            self._starts = [(0, version)]  # it has not begun
        # One that has spoken and is not known any more has ended: its last tokens are on their way.

    def hear(self, token_id: int, logprob: float, top: list[TokenLogprob] | None, unproven: int | None) -> None:
        """Take the next token; it is held if its version is `unproven`, or something before it is held."""
        version = next(version for start, version in reversed(self._starts) if start <= self.num_heard)
        self.num_heard += 1
        token = HeldToken(token_id, logprob, version, top)
        if self.held or (version == unproven and self._is_base):
            self.held.append(token)
        else:
            self._tell(token)

    def release(self) -> None:
        """The version is proven: tell what was held."""
        held, self.held = self.held, []
        for token in held:
            self._tell(token)

    def _tell(self, token: HeldToken) -> None:
        if not self.sequence.has_ended:
            self.sequence.add(token.token_id, token.logprob, token.version, token.top)


def by_choice(counts: dict[str, int]) -> dict[tuple[str, int], int]:
    """Counts under the names that vLLM makes of ours (`1_...-mettle<32 hex digits>-...`) as name and index."""
    found: dict[tuple[str, int], int] = {}
    for internal, count in counts.items():
        if (match := _NAME.match(internal)) is not None:
            found[match[2], int(match[1] or 0)] = count
    return found


def alternatives(entry: dict[str, Any], wanted: int) -> list[TokenLogprob] | None:
    """The most likely tokens at one position, as many as were asked for."""
    if not wanted:
        return None
    top = sorted(entry["top_logprobs"], key=lambda other: -other["logprob"])[:wanted]
    return [TokenLogprob(other["token_id"], other["logprob"]) for other in top]
