"""Rollouts to samples: the turns of one rollout become as few token sequences as possible.

A turn whose prompt continues everything before it extends the current sequence; one whose prompt was rewritten (its
`prefix_length` is shorter) closes the sequence and branches off. A sampled token that several branches share
trains once, in the first; the later ones carry it as context. Nothing is tokenized here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mettle.orchestrator.credit import fill_columns, has_signal, wide_columns
from mettle.records.tasks import Credit, GroupRecord, RolloutRecord, Turn
from mettle.records.tokens import FloatArray, IntArray, Sample, SampledBy, filled

if TYPE_CHECKING:
    from mettle.orchestrator.services import ScoringModel


def group_samples(group: GroupRecord, *, seq_len: int, keep_zero_advantages: bool) -> list[Sample]:
    """The samples of a group's rollouts that train: credited, with a signal, and a sampled token within `seq_len`."""
    found: list[Sample] = []
    for rollout in group.rollouts:
        if rollout.credit is None or not (keep_zero_advantages or has_signal(rollout.credit, rollout)):
            continue
        found += rollout_samples(rollout, draw_id=group.draw.draw_id, seq_len=seq_len)
    return found


def rollout_samples(rollout: RolloutRecord, *, draw_id: int, seq_len: int) -> list[Sample]:
    """The samples of one rollout, with its credit on its tokens."""
    found = []
    for branch in _branches(rollout.turns):
        sample = branch.sample(rollout.credit or {}, draw_id, rollout.rollout_id, seq_len)
        if sample is not None:
            found.append(sample)
    return found


async def sampled_logprobs(
    turns: tuple[Turn, ...], model: ScoringModel, before: IntArray | None = None
) -> list[FloatArray]:
    """What a model says of the sampled tokens of each turn, each read in the context that it was sampled in, with the
    tokens `before` ahead of it."""
    branches, ahead = list(_branches(turns)), _NOTHING if before is None else before
    scored = await asyncio.gather(*(model.logprobs(_joined(ahead, branch)) for branch in branches))
    return [
        logprobs[len(ahead) :][start : start + len(turn.completion_ids)]
        for branch, logprobs in zip(branches, scored, strict=True)
        for start, _, turn in branch.sampled
    ]


async def sampled_alternatives(
    turns: tuple[Turn, ...], model: ScoringModel, number: int, before: IntArray | None = None
) -> list[tuple[IntArray, FloatArray]]:
    """([tokens, number] ids, [tokens, number] logprobs) of what the model would likeliest have said in the place of the
    sampled tokens of each turn."""
    branches, ahead = list(_branches(turns)), _NOTHING if before is None else before
    told = await asyncio.gather(*(model.likeliest(_joined(ahead, branch), number) for branch in branches))
    found = []
    for branch, (ids, logprobs) in zip(branches, told, strict=True):
        for start, _, turn in branch.sampled:
            place = slice(len(ahead) + start, len(ahead) + start + len(turn.completion_ids))
            found.append((ids[place], logprobs[place]))
    return found


def _joined(ahead: IntArray, branch: _Branch) -> IntArray:
    return np.concatenate([ahead, branch.tokens()]) if len(ahead) else branch.tokens()


_NOTHING = np.zeros(0, np.int32)


def by_turn(turns: tuple[Turn, ...], known: Callable[[IntArray], FloatArray | None]) -> list[FloatArray | None]:
    """What is `known` of the sequences of a rollout, for the sampled tokens of each turn; None where nothing is."""
    found: list[FloatArray | None] = []
    for branch in _branches(turns):
        values = known(branch.tokens())
        for start, _, turn in branch.sampled:
            found.append(None if values is None else values[start : start + len(turn.completion_ids)])
    return found


def contexts_of(turns: tuple[Turn, ...]) -> list[IntArray]:
    """All the tokens before the completion of each turn, as the policy saw them."""
    return [branch.tokens()[:start] for branch in _branches(turns) for start, _, _ in branch.sampled]


class _Branch:
    """Pieces of one sequence, joined once at the end. `sampled` has (place, number, turn) of each completion in it."""

    def __init__(self, context_ids: IntArray) -> None:
        self.token_ids: list[IntArray] = [context_ids] if len(context_ids) else []
        self.sampled: list[tuple[int, int, Turn]] = []
        self.length = len(context_ids)

    def add(self, number: int, turn: Turn) -> None:
        self.token_ids += [turn.new_prompt_ids, turn.completion_ids]
        self.sampled.append((self.length + len(turn.new_prompt_ids), number, turn))
        self.length += len(turn.new_prompt_ids) + len(turn.completion_ids)

    def tokens(self) -> IntArray:
        return np.concatenate(self.token_ids).astype(np.int32, copy=False) if self.token_ids else np.zeros(0, np.int32)

    def _no_experts(self, length: int) -> dict[str, NDArray[np.int16]]:
        """The column of experts, all unknown, where some turn has it."""
        width = next((turn.experts.shape[1] for _, _, turn in self.sampled if turn.experts is not None), 0)
        return {"experts": np.full((length, width), -1, np.int16)} if width else {}

    def sample(self, credit: Credit, draw_id: int, rollout_id: str, seq_len: int) -> Sample | None:
        length = min(self.length, seq_len)
        wide = wide_columns(credit, length) | self._no_experts(length)
        columns = filled(length, {"token_ids": self.tokens()[:length], **wide})
        replicas: list[SampledBy] = []
        has_sampled = False
        for start, number, turn in self.sampled:
            place = slice(start, min(start + len(turn.completion_ids), length))
            if place.stop <= start:
                continue
            has_sampled = True
            count = place.stop - start
            columns["loss_mask"][place] = True
            columns["logprobs"][place] = turn.logprobs[:count]
            columns["versions"][place] = turn.versions[:count]
            columns["temperatures"][place] = turn.temperature
            if turn.experts is not None:
                columns["experts"][place] = turn.experts[:count]
            fill_columns(columns, credit, number, turn, place)
            if turn.replica:
                replicas.append(SampledBy(place.start, place.stop, turn.replica))
        if not has_sampled:
            return None
        return Sample(draw_id=draw_id, rollout_id=rollout_id, replicas=tuple(replicas), **columns)


def _branches(turns: tuple[Turn, ...]) -> Iterator[_Branch]:
    branch: _Branch | None = None
    for number, turn in enumerate(turns):
        if branch is None:
            if turn.prefix_length:
                raise ValueError(f"the first turn continues {turn.prefix_length} tokens that were never seen")
            branch = _Branch(np.zeros(0, np.int32))
        elif turn.prefix_length > branch.length:
            raise ValueError(f"a turn continues {turn.prefix_length} tokens of a sequence of {branch.length}")
        elif turn.prefix_length < branch.length:
            yield branch
            branch = _Branch(branch.tokens()[: turn.prefix_length])
        branch.add(number, turn)
    if branch is not None:
        yield branch
