"""The canary: what it compares, what it lets pass, and what it says of what it does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from policies import picked_logprobs

from mettle.inference.engine.architecture import shape_from_config
from mettle.inference.engine.canary import check_canary
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.protocol import WeightsRejected
from mettle.inference.engine.weights import fuse
from mettle.storage.weights import Canary

IDS = [[5, 9, 2, 7, 1, 3], [8, 8, 4, 6, 0, 0]]
LENGTHS = [6, 4]


@pytest.fixture(scope="module")
def decoder(model: Any) -> Decoder:
    shape = shape_from_config(model.config.to_dict())
    return Decoder(shape, fuse(shape, model.state_dict(), torch.device("cpu"), torch.float32), 64)


def canary_of(model: Any, ids: list[list[int]], lengths: list[int], off_by: Any = 0.0) -> Canary:
    """The model's own log-probabilities, plus `off_by` where a token counts; nonsense where none does."""
    logprobs = np.full((len(ids), max(map(len, ids), default=1)), 77.0, dtype=np.float32)
    for row, length in enumerate(lengths):
        if length > 1:
            logprobs[row, 1:length] = picked_logprobs(model, ids[row][:length]).numpy()
            logprobs[row, 1:length] += np.broadcast_to(off_by, (len(ids), logprobs.shape[1]))[row, 1:length]
    width = logprobs.shape[1]
    padded = np.array([[*row, *[0] * (width - len(row))] for row in ids], dtype=np.int32).reshape(len(ids), width)
    return Canary(padded, np.array(lengths, dtype=np.int32), logprobs)


def test_what_agrees_passes_and_padding_and_first_tokens_do_not_count(model: Any, decoder: Decoder) -> None:
    check = check_canary(decoder, canary_of(model, IDS, LENGTHS), 4, 1e-4)
    assert (check.version, check.num_tokens) == (4, 5 + 3)
    assert 0 <= check.mean_abs_diff <= check.max_abs_diff < 1e-5


def test_the_difference_is_the_mean_of_the_absolute_ones_and_the_largest_is_told(model: Any, decoder: Decoder) -> None:
    off = np.zeros((2, 6))
    off[0, 2], off[1, 3] = 0.4, -0.8
    check = check_canary(decoder, canary_of(model, IDS, LENGTHS, off), 1, 0.2)
    assert check.mean_abs_diff == pytest.approx(1.2 / 8, abs=1e-4)
    assert check.max_abs_diff == pytest.approx(0.8, abs=1e-4)


def test_more_than_is_allowed_is_refused_with_the_figures(model: Any, decoder: Decoder) -> None:
    with pytest.raises(WeightsRejected) as caught:
        check_canary(decoder, canary_of(model, IDS, LENGTHS, 0.25), 9, 0.125)
    assert "version 9 is not served" in str(caught.value)
    assert "0.25 in the mean (0.25 at most) over 8 canary tokens, more than the 0.125 allowed" in str(caught.value)
    check = caught.value.canary
    assert check is not None
    assert (check.version, check.num_tokens) == (9, 8)
    assert check.mean_abs_diff == pytest.approx(0.25, abs=1e-4)


def test_just_what_is_allowed_passes(model: Any, decoder: Decoder) -> None:
    canary = canary_of(model, IDS, LENGTHS, 0.25)
    with pytest.raises(WeightsRejected) as caught:
        check_canary(decoder, canary, 1, 0.0)
    assert caught.value.canary is not None
    mean = caught.value.canary.mean_abs_diff
    assert check_canary(decoder, canary, 1, mean).mean_abs_diff == mean


def test_what_is_not_a_number_is_refused(model: Any, decoder: Decoder) -> None:
    with pytest.raises(WeightsRejected, match="nan in the mean"):
        check_canary(decoder, canary_of(model, IDS, LENGTHS, np.nan), 1, 1e9)


@pytest.mark.parametrize(("ids", "lengths"), [([], []), ([[5, 6]], [1]), ([[5, 6], [7, 8]], [0, 1])])
def test_nothing_to_compare_is_refused(model: Any, decoder: Decoder, ids: list[list[int]], lengths: list[int]) -> None:
    with pytest.raises(WeightsRejected, match="canary of version 3 holds no tokens to compare"):
        check_canary(decoder, canary_of(model, ids, lengths), 3, 1.0)


def test_a_sequence_of_two_tokens_counts_and_one_of_one_does_not(model: Any, decoder: Decoder) -> None:
    assert check_canary(decoder, canary_of(model, [[5, 6], [7, 0]], [2, 1]), 1, 1e-4).num_tokens == 1


@pytest.mark.parametrize("outside", [-1, 264, 100_000])
def test_a_token_outside_the_vocabulary_is_refused_and_its_edges_are_not(
    model: Any, decoder: Decoder, outside: int
) -> None:
    assert check_canary(decoder, canary_of(model, [[0, 263, 0]], [3]), 1, 1e-4).num_tokens == 2
    canary = canary_of(model, IDS, LENGTHS)
    canary.token_ids[1, 2] = outside
    with pytest.raises(WeightsRejected, match="outside the vocabulary of 264"):
        check_canary(decoder, canary, 1, 1.0)
