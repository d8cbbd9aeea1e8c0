"""The trainer's log-probabilities beside a batch: found again by the tokens of a sequence, or not at all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.records.tokens import Batch, filled
from mettle.storage.trained_logprobs import TrainedLogprobs, logprobs_path, write_trained_logprobs

DIGEST = "d" * 64


def batch_of(sequences):
    tokens = np.array([token for sequence in sequences for token in sequence], np.int32)
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    return Batch(sequence_lengths=lengths, step=1, draw_ids=(1,), **filled(len(tokens), {"token_ids": tokens}))


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=6), min_size=1, max_size=6))
def test_each_sequence_gets_back_what_its_own_tokens_had(tmp_path_factory, drawn):
    folder = tmp_path_factory.getbasetemp()
    sequences = [[token for token, _ in sequence] for sequence in drawn]
    is_trained = [trained for sequence in drawn for _, trained in sequence]
    members = np.flatnonzero(np.array(is_trained, bool))
    # A token's value is that of its beginning, as a model's is: equal sequences have equal values.
    values = [hash(tuple(s[: i + 1])) % 97 / -97 for s in sequences for i in range(len(s))]
    write_trained_logprobs(folder, DIGEST, batch_of(sequences), members, np.array(values, np.float32)[members])
    read = TrainedLogprobs.read(folder, DIGEST)
    start = 0
    for sequence in sequences:
        own = range(start, start + len(sequence))
        start += len(sequence)
        found = read.of(np.array(sequence, np.int32))
        if found is None:
            assert not any(is_trained[i] for i in own)
            continue
        for i, value in zip(own, found, strict=True):
            assert np.isnan(value) or value == np.float32(values[i])
            # Of equal sequences that train different tokens the first is found.
            assert not is_trained[i] or sequences.count(sequence) > 1 or np.isfinite(value)


def test_one_that_was_cut_in_the_batch_is_found_by_its_beginning(tmp_path):
    write_trained_logprobs(tmp_path, DIGEST, batch_of([[1, 2, 3, 4]]), np.array([2, 3]), np.array([-1, -2], np.float32))
    read = TrainedLogprobs.read(tmp_path, DIGEST)
    np.testing.assert_array_equal(
        read.of(np.array([1, 2, 3, 4, 5, 6], np.int32)), [np.nan, np.nan, -1, -2, np.nan, np.nan]
    )
    assert read.of(np.array([1, 2, 9, 4], np.int32)) is None
    assert read.of(np.array([1, 2], np.int32)) is None


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: b"X" + data[1:]])
def test_a_damaged_file_is_none(tmp_path, damage):
    write_trained_logprobs(tmp_path, DIGEST, batch_of([[1, 2]]), np.array([1]), np.array([-1], np.float32))
    path = logprobs_path(tmp_path, DIGEST)
    path.write_bytes(damage(path.read_bytes()))
    assert TrainedLogprobs.read(tmp_path, DIGEST) is None
    assert TrainedLogprobs.read(tmp_path, "e" * 64) is None
