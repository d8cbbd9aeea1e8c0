"""Logits moved before the temperature: biases of single tokens, and penalties for what has occurred already.

Legend: B rows, R rows that have any of it, V vocabulary. `frequency_penalty` is taken off once for each time that a
token was sampled, `presence_penalty` once if it was; `repetition_penalty` divides a positive logit of a token that was
sampled or stands in the prompt, and multiplies a negative one. Biases come first, then repetition, then the others.
Invariant: the counts follow what is sampled while a plan is in use, so a row's logits depend on its own tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mettle.records.sampling import SamplingParams


class PenalisedRow(Protocol):
    """What penalties read of a running sequence."""

    params: SamplingParams

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The prompt's tokens."""

    @property
    def sampled_ids(self) -> Sequence[int]:
        """The tokens sampled so far."""


class LogitShifts:
    """The biases and penalties of the rows that have some."""

    def __init__(
        self, rows: Sequence[PenalisedRow], places: Sequence[int], vocab_size: int, device: torch.device
    ) -> None:
        self._places_R = torch.tensor(places, device=device)
        params = [row.params for row in rows]
        biases = [(i, token, value) for i, p in enumerate(params) for token, value in p.logit_bias]
        self._bias_RV: Tensor | None = None
        if biases:
            self._bias_RV = torch.zeros(len(rows), vocab_size, device=device)
            for i, token, value in biases:
                self._bias_RV[i, token] = value
        self._counts_RV: Tensor | None = None
        if any(p.has_penalty for p in params):
            self._counts_RV = torch.stack([_counts(row.sampled_ids, vocab_size, device) for row in rows])
            self._in_prompt_RV = torch.stack([_counts(row.prompt_ids, vocab_size, device) > 0 for row in rows])
            self._repetition_R1 = torch.tensor([p.repetition_penalty for p in params], device=device)[:, None]
            self._presence_R1 = torch.tensor([p.presence_penalty for p in params], device=device)[:, None]
            self._frequency_R1 = torch.tensor([p.frequency_penalty for p in params], device=device)[:, None]

    def apply(self, logits_BV: Tensor) -> Tensor:
        """Logits with the rows' own ones moved."""
        moved_RV = logits_BV[self._places_R]
        if self._bias_RV is not None:
            moved_RV = moved_RV + self._bias_RV
        if self._counts_RV is not None:
            repeated_RV = torch.where(moved_RV > 0, moved_RV / self._repetition_R1, moved_RV * self._repetition_R1)
            moved_RV = torch.where(self._in_prompt_RV | (self._counts_RV > 0), repeated_RV, moved_RV)
            moved_RV = moved_RV - self._frequency_R1 * self._counts_RV - self._presence_R1 * (self._counts_RV > 0)
        result_BV = logits_BV.clone()
        result_BV[self._places_R] = moved_RV
        return result_BV

    def count(self, token_ids_B: Tensor) -> None:
        """Take note of what was sampled."""
        if self._counts_RV is not None:
            rows_R = torch.arange(len(self._places_R), device=token_ids_B.device)
            self._counts_RV[rows_R, token_ids_B[self._places_R]] += 1


def _counts(token_ids: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    ids = torch.tensor(token_ids, dtype=torch.int64, device=device)
    return torch.bincount(ids, minlength=vocab_size)
