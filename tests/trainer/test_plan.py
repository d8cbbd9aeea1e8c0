"""What follows from a plan's measurements."""

import dataclasses

import pytest

from mettle.trainer.plan import CALL_S, Measured, predict

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
