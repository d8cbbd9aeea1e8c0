"""Prompts that an engine may have seen in place of the recorded one, as a chat template makes them.

The last completion that is compared is looked at: behind it all that came before may have been rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mettle.trainer.layout import Index
from mettle.trainer.mismatch.tokens import ComparedSequence

MAX_DROPPED = 8
"""Tokens at the end of a prompt, such as the opening of the assistant's turn, that may be missing."""

Variant = tuple[str, ComparedSequence, NDArray[np.bool_]]


def variants(sequence: ComparedSequence) -> Iterator[Variant]:
    """(what is other, the sequence with it, which compared tokens are in it)."""
    last = int(sequence.turns[-1])
    kept = sequence.turns == last
    start = int(sequence.turn_starts[kept][0])
    prompt, rest = sequence.token_ids[:start], sequence.token_ids[start:]
    if len(prompt) > 1:
        yield "without its first token", _with_prompt(sequence, kept, prompt[1:], rest, start), kept
    yield "with its first token twice", _with_prompt(sequence, kept, np.r_[prompt[:1], prompt], rest, start), kept
    for number in range(1, min(MAX_DROPPED, len(prompt) - 1) + 1):
        name = f"without its last {number} tokens" if number > 1 else "without its last token"
        yield name, _with_prompt(sequence, kept, prompt[:-number], rest, start), kept
    if last > 0:
        is_sampled = np.zeros(len(prompt), bool)
        is_sampled[sequence.sampled[sequence.sampled < start]] = True
        yield "without what was sampled before", _with_prompt(sequence, kept, prompt[~is_sampled], rest, start), kept


def _with_prompt(
    sequence: ComparedSequence, kept: NDArray[np.bool_], prompt: Index, rest: Index, start: int
) -> ComparedSequence:
    return replace(
        sequence,
        token_ids=np.concatenate([prompt, rest]),
        places=sequence.places[kept] + len(prompt) - start,
        recorded=sequence.recorded[kept],
        temperatures=sequence.temperatures[kept],
        turns=sequence.turns[kept],
        turn_starts=np.full(int(kept.sum()), len(prompt)),
        experts=sequence.experts[kept],
    )
