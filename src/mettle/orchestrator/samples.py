"""Rollouts to samples: the turns of one rollout become as few token sequences as possible.

A turn whose prompt continues everything before it extends the current sequence; one whose prompt was rewritten (its
`prefix_length` is shorter) closes the sequence and branches off. A sampled token that several branches share
trains once, in the first; the later ones carry it as context. Nothing is tokenized here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mettle.records.tasks import GroupRecord, RolloutRecord, Turn
from mettle.records.tokens import BoolArray, FloatArray, IntArray, Sample


def group_samples(group: GroupRecord, *, seq_len: int, keep_zero_advantages: bool) -> list[Sample]:
    """The samples of a group's rollouts that have an advantage and at least one sampled token within `seq_len`."""
    found: list[Sample] = []
    for rollout in group.rollouts:
        if rollout.advantage is None or (rollout.advantage == 0.0 and not keep_zero_advantages):
            continue
        found += rollout_samples(rollout, draw_id=group.draw.draw_id, seq_len=seq_len)
    return found


def rollout_samples(rollout: RolloutRecord, *, draw_id: int, seq_len: int) -> list[Sample]:
    """The samples of one rollout, its advantage on every sampled token."""
    advantage = rollout.advantage or 0.0
    found = []
    for branch in _branches(rollout.turns):
        sample = branch.sample(advantage, draw_id, rollout.rollout_id, seq_len)
        if sample is not None:
            found.append(sample)
    return found


class _Branch:
    """Pieces of one sequence, joined once at the end."""

    def __init__(self, context_ids: IntArray) -> None:
        self.token_ids: list[IntArray] = [context_ids] if len(context_ids) else []
        self.sampled: list[tuple[int, Turn]] = []
        self.length = len(context_ids)

    def add(self, turn: Turn) -> None:
        self.token_ids += [turn.new_prompt_ids, turn.completion_ids]
        self.sampled.append((self.length + len(turn.new_prompt_ids), turn))
        self.length += len(turn.new_prompt_ids) + len(turn.completion_ids)

    def tokens(self) -> IntArray:
        return np.concatenate(self.token_ids).astype(np.int32, copy=False) if self.token_ids else np.zeros(0, np.int32)

    def sample(self, advantage: float, draw_id: int, rollout_id: str, seq_len: int) -> Sample | None:
        length = min(self.length, seq_len)
        loss_mask: BoolArray = np.zeros(length, np.bool_)
        logprobs: FloatArray = np.zeros(length, np.float32)
        versions: IntArray = np.full(length, -1, np.int32)
        temperatures: FloatArray = np.ones(length, np.float32)
        for start, turn in self.sampled:
            stop = min(start + len(turn.completion_ids), length)
            if stop <= start:
                continue
            count = stop - start
            loss_mask[start:stop] = True
            logprobs[start:stop] = turn.logprobs[:count]
            versions[start:stop] = turn.versions[:count]
            temperatures[start:stop] = turn.temperature
        if not loss_mask.any():
            return None
        weights = loss_mask.astype(np.float32)
        nothing: FloatArray = np.zeros(length, np.float32)
        return Sample(
            token_ids=self.tokens()[:length],
            loss_mask=loss_mask,
            logprobs=logprobs,
            versions=versions,
            temperatures=temperatures,
            advantages=weights * np.float32(advantage),
            rl_weights=weights,
            ce_weights=nothing,
            ref_kl_weights=nothing,
            ref_logprobs=nothing,
            draw_id=draw_id,
            rollout_id=rollout_id,
        )


def _branches(turns: tuple[Turn, ...]) -> Iterator[_Branch]:
    branch: _Branch | None = None
    for turn in turns:
        if branch is None:
            if turn.prefix_length:
                raise ValueError(f"the first turn continues {turn.prefix_length} tokens that were never seen")
            branch = _Branch(np.zeros(0, np.int32))
        elif turn.prefix_length > branch.length:
            raise ValueError(f"a turn continues {turn.prefix_length} tokens of a sequence of {branch.length}")
        elif turn.prefix_length < branch.length:
            yield branch
            branch = _Branch(branch.tokens()[: turn.prefix_length])
        branch.add(turn)
    if branch is not None:
        yield branch
