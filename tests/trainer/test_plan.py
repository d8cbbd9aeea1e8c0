"""What follows from a plan's measurements."""

import dataclasses

import pytest

from mettle.trainer.plan import CALL_S, Measured, further_bytes, predict

SEEN = Measured(
    prompt_tokens=10, completion_tokens=20, reward=0.5, num_sequences=8, prefill_s=1.0, decode_token_s=0.1,
    micro_step_s=2.0, micro_rollouts=4, max_tokens=100, publish_s=0.5, update_s=0.25, trainer_bytes=100, engine_bytes=50,
)  # fmt: skip


def test_waves_of_sequences_and_micro_steps_make_a_step():
    plan = predict(SEEN, batch_size=16, max_steps=10, is_overlapped=True)
    assert plan.sample_s == pytest.approx(2 * (1 + 20 * 0.1) + 16 * CALL_S)
    assert plan.train_s == pytest.approx(4 * 2.0)
    assert plan.step_s == pytest.approx(8.5)
    assert plan.run_s == pytest.approx(85)
    assert plan.memory_bytes > 150


def test_on_one_core_sampling_and_training_take_turns():
    plan = predict(SEEN, batch_size=16, max_steps=1, is_overlapped=False)
    assert plan.step_s == pytest.approx(8.5 + 6.25 + 16 * CALL_S)
    slow = dataclasses.replace(SEEN, decode_token_s=1.0)
    assert predict(slow, batch_size=16, max_steps=1, is_overlapped=True).step_s == pytest.approx(
        2 * 21 + 0.25 + 16 * CALL_S
    )


def test_ranks_share_the_training_and_each_reads_the_weights():
    four = dataclasses.replace(SEEN, num_ranks=4, num_at_once=2, rank_bytes=7)
    one, plan = (predict(seen, batch_size=16, max_steps=1, is_overlapped=True) for seen in (SEEN, four))
    assert plan.train_s == pytest.approx(one.train_s / 1.9)
    assert plan.memory_bytes == one.memory_bytes + 7
    sizes = {"weights": 1000, "process": 100, "activations": 50}
    assert further_bytes(**sizes, alone=4150, num_ranks=1, num_replicas=1, is_base=True) == 0
    assert further_bytes(**sizes, alone=4150, num_ranks=2, num_replicas=1, is_base=True) == 150
    assert further_bytes(**sizes, alone=4150, num_ranks=4, num_replicas=2, is_base=True) == 450 + 4000
    assert further_bytes(**sizes, alone=1150, num_ranks=4, num_replicas=1, is_base=False) == 4400 - 1150
