"""Which task comes next: every row once an epoch, the same order after a restart, middling tasks first."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mettle.orchestrator.config import CurriculumConfig
from mettle.orchestrator.curriculum import Curriculum, DifficultyPool, PastDraw, StandardSampler


def standard(size=5, past=(), *, shuffle=True, seed=0):
    return StandardSampler("words", size, past, seed=seed, shuffle=shuffle)


def pool(size=5, past=(), seed=0, **options):
    return DifficultyPool("words", size, past, CurriculumConfig(sampler="difficulty_pool", **options), seed=seed)


def test_every_row_is_drawn_once_an_epoch_in_another_order():
    sampler = standard()
    epochs = [[sampler.next() for _ in range(5)] for _ in range(3)]
    for number, epoch in enumerate(epochs):
        assert sorted(epoch) == [(number, row) for row in range(5)]
    assert len({tuple(row for _, row in epoch) for epoch in epochs}) > 1


def test_without_shuffle_the_order_is_that_of_the_data():
    sampler = standard(shuffle=False)
    assert [sampler.next()[1] for _ in range(6)] == [0, 1, 2, 3, 4, 0]


@given(
    kind=st.sampled_from([standard, pool]),
    num_before=st.integers(0, 17),
    rewards=st.lists(st.floats(0, 1), min_size=17, max_size=17),
)
def test_a_restart_goes_on_with_the_same_tasks(kind, num_before, rewards):
    sampler = kind()
    past = []
    for index in range(num_before):
        _, row = sampler.next()
        past.append(PastDraw(row, rewards[index]))
        sampler.observe(row, rewards[index])
    again = kind(past=past)
    assert [sampler.next() for _ in range(12)] == [again.next() for _ in range(12)]


def test_a_draw_is_unique_by_row_and_epoch_under_both_samplers():
    for sampler in (standard(), pool()):
        draws = [sampler.next() for _ in range(40)]
        assert len(set(draws)) == 40


def test_hard_and_easy_tasks_are_drawn_less():
    sampler = pool(3, hard_weight=0.1, easy_weight=0.1)
    sampler.observe(0, 0.0)
    sampler.observe(1, 0.5)
    sampler.observe(2, 1.0)
    counts = Counter(sampler.next()[1] for _ in range(600))
    assert counts[1] > 4 * counts[0]
    assert counts[1] > 4 * counts[2]
    assert counts[0] > 0


def test_pools_of_weight_zero_are_used_when_nothing_else_is_left():
    sampler = pool(2, hard_weight=0.0)
    sampler.observe(0, 0.0)
    sampler.observe(1, 0.0)
    assert {sampler.next()[1] for _ in range(20)} == {0, 1}


@given(ratio=st.floats(0.1, 5.0))
def test_environments_are_mixed_by_their_ratios(ratio):
    samplers = {"a": standard(1000), "b": standard(1000)}
    curriculum = Curriculum(samplers, {"a": 1.0, "b": ratio}, lambda env, row: f"{env}{row}")
    counts = Counter(draw[0] for draw in curriculum.draw(200))
    assert abs(counts["a"] - 200 / (1 + ratio)) <= 1
    assert curriculum.state() == dict(counts)
