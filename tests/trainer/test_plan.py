"""What follows from a plan's measurements."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.trainer.plan import CALL_S, Measured, QuietTime, Rivals, further_bytes, predict

SEEN = Measured(
    prompt_tokens=10, completion_tokens=20, reward=0.5, num_sequences=8, prefill_s=1.0, decode_token_s=0.1,
    micro_step_s=2.0, micro_rollouts=4, max_tokens=100, publish_s=0.5, update_s=0.25, trainer_bytes=100, engine_bytes=50,
)  # fmt: skip


def test_waves_of_sequences_and_micro_steps_make_a_step():
    plan = predict(SEEN, batch_size=16, max_steps=10, cores=2)
    assert plan.sample_s == pytest.approx(2 * (1 + 20 * 0.1))
    assert plan.train_s == pytest.approx(4 * 2.0)
    assert plan.step_s == pytest.approx(8.5)
    assert plan.run_s == pytest.approx(85)
    assert plan.memory_bytes > 150
    slow = dataclasses.replace(SEEN, decode_token_s=1.0)
    assert predict(slow, batch_size=16, max_steps=1, cores=2).step_s == pytest.approx(2 * 21 + 0.25)


def test_what_wants_more_cores_than_there_are_shares_them():
    work_s = 8.5 + 6.25 + 16 * CALL_S
    assert predict(SEEN, batch_size=16, max_steps=1, cores=1).step_s == pytest.approx(work_s)
    broad = predict(SEEN, batch_size=16, max_steps=1, cores=2, trainer_threads=2, engine_threads=2)
    assert broad.step_s == pytest.approx(8.5 + 6.25 + 8 * CALL_S)
    chatty = dataclasses.replace(SEEN, calls=2000)
    assert predict(chatty, batch_size=16, max_steps=1, cores=3).step_s == pytest.approx(32_000 * CALL_S)
    assert predict(chatty, batch_size=16, max_steps=1, cores=2).step_s == pytest.approx(32_000 * CALL_S)
    assert predict(chatty, batch_size=16, max_steps=1, cores=1).step_s == pytest.approx(8.5 + 6.25 + 32_000 * CALL_S)


def test_without_a_lag_sampling_and_training_take_turns_on_any_number_of_cores():
    for cores in (2, 64):
        plan = predict(SEEN, batch_size=16, max_steps=1, cores=cores, is_synchronous=True)
        assert plan.step_s == pytest.approx(8.5 + 6.25)


def test_ranks_share_the_training_and_each_reads_the_weights():
    four = dataclasses.replace(SEEN, num_ranks=4, num_at_once=2, rank_bytes=7)
    one, plan = (predict(seen, batch_size=16, max_steps=1, cores=4) for seen in (SEEN, four))
    assert plan.train_s == pytest.approx(one.train_s / 1.9)
    assert plan.memory_bytes == one.memory_bytes + 7
    sizes = {"weights": 1000, "process": 100, "activations": 50}
    assert further_bytes(**sizes, alone=4150, num_ranks=1, num_replicas=1, is_base=True) == 0
    assert further_bytes(**sizes, alone=4150, num_ranks=2, num_replicas=1, is_base=True) == 150
    assert further_bytes(**sizes, alone=4150, num_ranks=4, num_replicas=2, is_base=True) == 450 + 4000
    assert further_bytes(**sizes, alone=1150, num_ranks=4, num_replicas=1, is_base=False) == 4400 - 1150


def test_what_others_take_makes_the_step_longer_and_not_the_quiet_one():
    loaded = dataclasses.replace(SEEN, cpu_share=0.5)
    quiet, busy = (predict(seen, batch_size=16, max_steps=10, cores=2) for seen in (SEEN, loaded))
    assert quiet.quiet_step_s == quiet.step_s == busy.quiet_step_s
    # Two cores among four threads, one of them ours; the trainer works all the time, and the others some of it.
    own = (8.5 + 6.25 + 16 * CALL_S) / 8.5
    assert busy.step_s == pytest.approx(quiet.step_s * (3 + own) / 2)
    assert busy.run_s == pytest.approx(10 * busy.step_s)
    assert busy.train_s == pytest.approx(quiet.train_s * (3 + own) / 2)


def test_a_load_that_is_more_than_the_measuring_felt_counts_unless_it_is_over():
    felt = dataclasses.replace(SEEN, cpu_share=0.5)
    one, more, over = (
        predict(dataclasses.replace(felt, cpu_share=share, load=load), batch_size=16, max_steps=1, cores=2)
        for share, load in ((0.5, 2.0), (0.5, 11.0), (1.0, 11.0))
    )
    assert one.step_s == pytest.approx(predict(felt, batch_size=16, max_steps=1, cores=2).step_s)
    own = (8.5 + 6.25 + 16 * CALL_S) / 8.5
    assert more.step_s == pytest.approx(8.5 * (10 + own) / 2)
    assert over.step_s == over.quiet_step_s == more.quiet_step_s


@given(share=st.floats(0.01, 1), cores=st.integers(1, 16), work=st.floats(1, 16))
def test_others_and_further_work_never_make_it_quicker(share: float, cores: int, work: float):
    alone, crowded = Rivals(cores, 1.0), Rivals(cores, share)
    assert crowded.stretched(1.0, 1.0) == pytest.approx(1 / share)
    assert alone.stretched(1.0, work) == pytest.approx(max(1.0, work / cores))
    assert crowded.stretched(1.0, work) >= max(alone.stretched(1.0, work), crowded.stretched(1.0, 1.0)) - 1e-9


def test_waits_for_a_core_are_not_counted(monkeypatch):
    waits = iter([{"1": 2.0, "2": 0.0}, {"1": 5.0, "2": 1.0, "3": 0.5}])
    clock = iter([10.0, 14.0])
    monkeypatch.setattr("mettle.trainer.plan.waits_for_cores_s", lambda: next(waits))
    monkeypatch.setattr("mettle.trainer.plan.time.perf_counter", lambda: next(clock))
    watch = QuietTime()
    assert watch.measure(lambda: None) == pytest.approx(1.0, abs=0.2)
    assert watch.share == pytest.approx(0.25, abs=0.05)


def test_without_the_kernel_s_word_a_thread_s_own_time_counts(monkeypatch):
    monkeypatch.setattr("mettle.trainer.plan.waits_for_cores_s", lambda: None)
    clock = iter([0.0, 1e6])
    monkeypatch.setattr("mettle.trainer.plan.time.perf_counter", lambda: next(clock))
    assert QuietTime().measure(lambda: sum(range(1000))) < 1e5
