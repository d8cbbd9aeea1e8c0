"""The experts of a token from the engine's answer to the batch: nothing is lost on the way."""

from array import array

import numpy as np
import pytest

from mettle.envs.rollout_record import turns_of
from mettle.orchestrator.samples import rollout_samples
from mettle.processes.frames import HEADER, decode, encode, lengths_of
from mettle.records.experts import read_experts, wire_experts
from mettle.records.messages import ResponseTokens
from mettle.records.tasks import GroupRecord, RolloutRecord, TaskDraw
from mettle.records.tokens import Batch, Sample, end_to_end, filled
from mettle.storage.batches import read_batch, write_batch
from mettle.storage.shards import decode_group, encode_group

ROWS = np.arange(12, dtype=np.int16).reshape(3, 4)


def test_rows_come_back_from_the_wire():
    assert np.array_equal(np.array(read_experts(wire_experts(list(ROWS)), 3)).reshape(3, 4), ROWS)
    assert len(read_experts(None, 3)) == 0
    with pytest.raises(ValueError, match="12 experts do not divide among 5 tokens"):
        read_experts(wire_experts(list(ROWS)), 5)


def test_a_cut_completion_keeps_the_experts_of_what_is_left():
    tokens = ResponseTokens([1, 2], [5, 6, 7], [-1.0] * 3, [0] * 3, completion_experts=ROWS.ravel().tolist())
    tokens.cut(4)
    assert tokens["completion_experts"].tolist() == ROWS[:2].ravel().tolist()
    again = ResponseTokens.from_parts(**tokens.parts())
    assert again["completion_experts"] == tokens["completion_experts"]


def test_what_a_call_says_of_its_tokens_stands_in_the_batch(tmp_path):
    """From the client through a worker's frame, the record, the shard and the sample to the file of a batch."""
    mask = [1, 0, 1]  # the middle one came from elsewhere
    tokens = ResponseTokens(
        [1, 2], [5, 6, 7], [-1.0] * 3, [0] * 3, completion_mask=mask, completion_experts=ROWS.ravel().tolist()
    )
    name = "completion_experts"
    frame = encode({"tokens": {}}, [tokens.parts()[name]])
    first, _ = lengths_of(frame[: HEADER.size])
    body = frame[HEADER.size :]
    assert decode(body[:first], body[first:])["arrays"] == [array("h", ROWS.ravel().tolist())]
    turns = turns_of([{"tokens": tokens}], 1.0, None)
    plain = turns_of([{"tokens": ResponseTokens([3], [4], [-1.0], [0])}], 1.0, None)
    records = (RolloutRecord("a", 1.0, {}, [], turns), RolloutRecord("b", 0.0, {}, [], plain))
    group = decode_group(encode_group(GroupRecord(TaskDraw(1, "e", "u", 0, 3), 0, records)))
    samples = [rollout_samples(rollout, draw_id=1, seq_len=99)[0] for rollout in group.rollouts]
    unknown = [-1] * 4
    assert samples[0].experts.tolist() == [unknown, unknown, [0, 1, 2, 3], unknown, [8, 9, 10, 11]]
    batch = Batch(sequence_lengths=np.array([5, 2], np.int32), step=1, draw_ids=(1,), **end_to_end(samples))
    digest, _ = write_batch(tmp_path, batch)
    assert np.array_equal(read_batch(tmp_path, digest).experts, batch.experts)
    without = Batch(
        sequence_lengths=np.array([2], np.int32), step=1, draw_ids=(1,), **end_to_end([Sample(**filled(2, {}))])
    )
    assert read_batch(tmp_path, write_batch(tmp_path, without)[0]).experts.shape == (2, 0)


def test_sequences_with_and_without_experts_stand_in_one_batch():
    def sample(length, width):
        columns = filled(length, {"token_ids": np.arange(length)})
        return Sample(**columns | {"experts": np.full((length, width), 3, np.int16)})

    joined = end_to_end([sample(2, 4), sample(3, 0)])["experts"]
    assert joined.tolist() == [[3] * 4] * 2 + [[-1] * 4] * 3
    with pytest.raises(ValueError, match="4 and 6 experts a token"):
        end_to_end([sample(2, 4), sample(2, 6)])
