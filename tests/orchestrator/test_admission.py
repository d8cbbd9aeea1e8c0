"""What becomes of a group: trained, dropped with a reason, or tried again."""

import asyncio

import numpy as np
import pytest

from mettle.envs.workers.spawn import WorkerDied
from mettle.errors import ProviderError, UserError
from mettle.orchestrator.admission import (
    ENVIRONMENT_KINDS,
    LOSSES,
    WORKER_ERRORS,
    Admission,
    AdmissionGate,
    FailureStreak,
    judge_group,
    main_error,
)
from mettle.orchestrator.algorithms import Algorithm, RunAlgorithms, make_algorithm
from mettle.orchestrator.batcher import Batcher, ReadyGroup, Starvation
from mettle.orchestrator.config import CurriculumConfig, RetryConfig
from mettle.orchestrator.dispatcher import Blame
from mettle.orchestrator.samples import group_samples
from mettle.orchestrator.services import InMemoryServices
from mettle.records.tasks import DropReason, GroupRecord, RolloutRecord, TaskDraw, Turn
from mettle.sandbox.service.faults import NoService


def rollout(reward, error_kind=None, *, version=0, num_tokens=2, is_truncated=False, chain=None):
    turn = Turn(
        0, np.array([1], np.int32), np.full(num_tokens, 5, np.int32), np.full(num_tokens, -0.5, np.float32),
        np.full(num_tokens, version, np.int32),
    )  # fmt: skip
    error = f"{error_kind} broke" if error_kind else None
    return RolloutRecord(
        f"r{id(turn)}",
        reward,
        {},
        [],
        (turn,),
        error_kind=error_kind,
        error=error,
        is_truncated=is_truncated,
        error_chain=chain,
    )


def group(*rollouts, draw_id=1):
    return GroupRecord(TaskDraw(draw_id, "words", "u", 0, 0), 0, rollouts)


def judged(*rollouts, num_failures=0, failures=None, keep_zero=False, algorithm="grpo", **curriculum):
    made = make_algorithm(algorithm, {}) if isinstance(algorithm, str) else algorithm
    judging = judge_group(
        group(*rollouts), made, InMemoryServices(), retry=RetryConfig(max_attempts=3),
        failures=failures or {Blame.TASK: num_failures}, filter_zero_advantages=not keep_zero, gate=AdmissionGate.of(CurriculumConfig(**curriculum)),
    )  # fmt: skip
    return asyncio.run(judging)


def test_groups_too_hard_too_easy_or_too_even_are_replaced_where_the_curriculum_says_so():
    def drop(*values, **curriculum):
        return judged(*map(rollout, values), algorithm="rae", **curriculum).drop

    solved, failed, between = (1.0, 1.0), (0.0, -0.1), (1.0, 0.0)
    assert [drop(*values, admit_above=0.0, admit_below=1.0) for values in (solved, failed, between)] == [
        DropReason.DIFFICULTY, DropReason.DIFFICULTY, None,
    ]  # fmt: skip
    assert [drop(*values) for values in (solved, failed)] == [None, None]
    assert drop(0.3, 0.2, admit_above=0.25) is DropReason.DIFFICULTY, "just at the bound is beyond it"
    assert drop(0.3, 0.2, admit_below=0.25) is DropReason.DIFFICULTY
    assert drop(0.3, 0.2, min_advantage=0.3) is DropReason.SMALL_ADVANTAGE
    assert drop(0.3, 0.2, min_advantage=0.29) is None
    # What is imitated is a signal without any advantage.
    assert judged(rollout(1.0), rollout(1.0), algorithm="imitation", min_advantage=0.5).is_admitted


def test_a_group_with_one_errored_rollout_keeps_the_baseline_of_the_rest():
    verdict = judged(rollout(1.0), rollout(0.0), rollout(None, "environment"), rollout(0.5))
    assert verdict.is_admitted
    assert [r.advantage for r in verdict.group.rollouts] == [0.5, -0.5, None, 0.0]


def test_equal_rewards_are_dropped_unless_they_are_to_be_kept():
    assert judged(rollout(1.0), rollout(1.0)).drop is DropReason.ZERO_ADVANTAGE
    assert judged(rollout(1.0), rollout(1.0), keep_zero=True).is_admitted


def test_a_group_that_sampled_nothing_is_dropped():
    assert judged(rollout(1.0, num_tokens=0), rollout(0.0, num_tokens=0)).drop is DropReason.NO_TOKENS


@pytest.mark.parametrize("kind", ["provider", "sandbox", "timeout"])
def test_failures_of_the_surroundings_are_tried_again_until_the_attempts_are_used_up(kind):
    failed = [rollout(None, kind) for _ in range(4)]
    assert judged(*failed).is_retried
    assert judged(*failed, num_failures=1).is_retried
    assert judged(*failed, num_failures=2).drop is DropReason.ERRORS


def test_what_the_run_has_lost_is_never_the_tasks_failure():
    """Also where it comes through the code of an environment or of a judge."""
    for kind, chain in (
        ("sandbox", "NoService"),
        ("sandbox", "SandboxError -> NoService"),
        ("judge", "J -> NoService"),
    ):
        lost = [rollout(None, "environment"), *(rollout(None, kind, chain=chain) for _ in range(3))]
        verdict = judged(*lost, failures={Blame.TASK: 2, Blame.WORKER: 2, Blame.RUN: 100})
        assert (verdict.is_retried, verdict.drop, verdict.blame) == (True, None, Blame.RUN)
    assert {NoService.__name__} == LOSSES
    assert {WorkerDied.__name__} == WORKER_ERRORS
    gone = [rollout(None, "sandbox", chain="ServiceLost") for _ in range(4)]
    assert judged(*gone, num_failures=2).drop is DropReason.ERRORS, "one that ended at work may be the task's doing"


def test_deaths_of_its_worker_are_counted_by_themselves():
    died = [rollout(None, "sandbox", chain="WorkerDied") for _ in range(4)]
    verdict = judged(*died, failures={Blame.TASK: 2, Blame.WORKER: 1, Blame.RUN: 9})
    assert (verdict.is_retried, verdict.blame) == (True, Blame.WORKER)
    assert judged(*died, failures={Blame.WORKER: 2}).drop is DropReason.ERRORS
    late = [rollout(None, "timeout") for _ in range(4)]
    assert judged(*late, failures={Blame.TASK: 1, Blame.WORKER: 2}).is_retried
    assert judged(*late, failures={Blame.TASK: 2}).drop is DropReason.ERRORS


@pytest.mark.parametrize("kind", ["environment", "judge", "overlong"])
def test_failures_of_the_task_itself_are_not_tried_again(kind):
    assert judged(*(rollout(None, kind) for _ in range(4))).drop is DropReason.ERRORS


def test_a_group_needs_half_of_its_rollouts():
    one_left = [rollout(1.0), *(rollout(None, "environment") for _ in range(3))]
    assert judged(*one_left).drop is DropReason.ERRORS
    assert judged(rollout(1.0), rollout(0.0), rollout(None, "judge"), rollout(None, "judge")).is_admitted


def test_of_an_odd_number_the_larger_half_is_needed_and_no_more():
    def verdict(num_scored, num_failed):
        return judged(
            *(rollout(float(i)) for i in range(num_scored)), *(rollout(None, "judge") for _ in range(num_failed))
        )

    assert verdict(3, 2).is_admitted
    assert verdict(2, 3).drop is DropReason.ERRORS
    assert verdict(4, 4).is_admitted
    assert verdict(3, 5).drop is DropReason.ERRORS
    assert verdict(2, 1).is_admitted


def test_as_many_survivors_are_needed_as_the_algorithm_compares():
    class Pairs(Says):
        min_group_size = 3

    credit = {"advantages": 1.0}
    two_left = [rollout(1.0), rollout(0.0), rollout(None, "judge"), rollout(None, "judge")]
    assert judged(*two_left, algorithm=Pairs(**credit)).drop is DropReason.ERRORS
    assert judged(*two_left[:3], rollout(0.5), algorithm=Pairs(**credit)).is_admitted
    # A group that was asked to be smaller than that is judged by its own size.
    assert judged(rollout(1.0), rollout(0.0), algorithm=Pairs(**credit)).is_admitted


def test_a_group_in_which_one_rollout_sampled_something_trains():
    assert judged(rollout(1.0, num_tokens=0), rollout(0.0)).is_admitted


def test_the_last_attempt_is_the_one_that_the_config_says():
    retry, failed = RetryConfig(max_attempts=1), group(rollout(None, "provider"))
    judging = judge_group(
        failed, make_algorithm("grpo", {}), InMemoryServices(), retry=retry, failures={},
        filter_zero_advantages=True,
    )  # fmt: skip
    verdict = asyncio.run(judging)
    assert (verdict.is_retried, verdict.is_admitted, verdict.drop) == (False, False, DropReason.ERRORS)


def test_what_the_run_trains_of_a_group_follows_its_filter():
    def samples(*, filters):
        algorithms = RunAlgorithms({"words": ("grpo", {})})
        admission = Admission(algorithms, InMemoryServices(), RetryConfig(), seq_len=9, filter_zero_advantages=filters)
        verdict = asyncio.run(admission.judge(group(rollout(1.0), rollout(0.0), rollout(0.5)), {}))
        return verdict, admission.samples_of(verdict.group)

    verdict, kept = samples(filters=True)
    assert verdict.is_admitted
    assert len(kept) == 2, "the one at the mean says nothing"
    assert len(samples(filters=False)[1]) == 3


def test_a_group_that_is_tried_again_is_neither_admitted_nor_dropped():
    verdict = judged(rollout(None, "provider"))
    assert (verdict.is_retried, verdict.drop, verdict.is_admitted) == (True, None, False)


def test_a_single_rollout_trains_under_an_algorithm_without_siblings():
    assert judged(rollout(1.0), algorithm="rae").is_admitted


class Says(Algorithm):
    """Credits each rollout with the same."""

    def __init__(self, **columns):
        self._columns = columns

    async def credit(self, group, services):
        await asyncio.sleep(0)
        if isinstance(self._columns.get("error"), Exception):
            raise self._columns["error"]
        return [dict(self._columns) for _ in group.rollouts]


@pytest.mark.parametrize(
    ("columns", "has_signal"),
    [
        ({"advantages": 0.0}, False),
        ({"advantages": [0.0]}, False),
        ({"advantages": [np.array([0.0, 0.1])]}, True),
        ({"advantages": 1.0, "rl_weights": 0.0}, False),
        ({"advantages": [np.array([1.0, 0.0])], "rl_weights": [np.array([0.0, 1.0])]}, False),
        ({"ref_kl_weights": 1.0, "ref_logprobs": -1.0}, True),
        ({"ce_weights": [np.array([0.5, 0.0, 0.0])]}, True),
        ({"ce_weights": 0.0, "ref_logprobs": -1.0}, False),
        ({}, False),
    ],
)
def test_a_signal_is_read_off_the_columns(columns, has_signal):
    verdict = judged(rollout(1.0), rollout(1.0), algorithm=Says(**columns))
    assert verdict.is_admitted == has_signal
    assert has_signal or verdict.drop is DropReason.ZERO_ADVANTAGE


def test_credit_for_an_errored_rollout_is_taken_away():
    verdict = judged(rollout(1.0), rollout(None, "judge"), algorithm=Says(advantages=1.0))
    assert [r.credit for r in verdict.group.rollouts] == [{"advantages": 1.0}, None]
    assert [r.advantage for r in verdict.group.rollouts] == [1.0, None]


def test_a_frozen_model_that_fails_sends_the_group_back_until_its_attempts_are_used_up():
    gone = Says(error=ProviderError("the teacher is gone"))
    assert judged(rollout(1.0), rollout(0.0), algorithm=gone).is_retried
    last = judged(rollout(1.0), rollout(0.0), algorithm=gone, num_failures=2)
    assert (last.drop, last.failure) == (DropReason.ERRORS, "the teacher is gone")


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"error": KeyError("teacher")}, "KeyError: 'teacher'"),
        ({"advantage": 1.0}, "there is no column 'advantage'; there are advantages, rl_weights"),
        ({"logprobs": 1.0}, "there is no column 'logprobs'"),
        ({"advantages": [1.0, 2.0]}, "a list of one entry for each of the 1 turns"),
        ({"advantages": "high"}, "a list of one entry for each of the 1 turns"),
        ({"advantages": [np.zeros(1)]}, r"shape \(1,\); it has 2 sampled tokens and adds 3 in all"),
        ({"advantages": float("nan")}, "advantages is nan"),
        ({"ref_kl_weights": 1.0}, "ref_kl_weights without ref_logprobs: .*so none would train"),
        ({"distill_weights": 1.0, "teacher_ids": [np.zeros((2, 1))]}, "teacher_ids without teacher_logprobs"),
    ],
)
def test_an_algorithm_that_is_wrong_ends_the_run_with_one_line(columns, why):
    with pytest.raises(UserError, match=f"algorithm Says failed on a group of 'words'.*{why}"):
        judged(rollout(1.0), rollout(0.0), algorithm=Says(**columns))


def test_a_streak_counts_groups_that_the_environment_failed_wholly():
    streak = FailureStreak()
    assert streak.observe(group(rollout(None, "judge"), rollout(None, "judge"))) == 1
    assert streak.observe(group(rollout(None, "provider"), rollout(None, "provider"))) == 1
    assert streak.observe(group(rollout(None, "environment"))) == 2
    assert streak.first_error == "judge: judge broke"
    assert streak.observe(group(rollout(0.0), rollout(None, "environment"))) == 0
    assert streak.observe(group(rollout(None, "provider"), rollout(None, "judge"))) == 0, "not wholly its own fault"
    assert streak.observe(group()) == 0
    assert streak.observe(group(rollout(None, "environment"))) == 1
    assert streak.first_error == "environment: environment broke", "the first of this streak"
    every = [rollout(None, kind) for kind in sorted(ENVIRONMENT_KINDS)]
    assert streak.observe(group(*every)) == 2, "one environment may fail in all of its ways at once"


def test_the_main_error_is_the_most_frequent_kind():
    rollouts = [rollout(None, "judge"), rollout(None, "timeout"), rollout(None, "timeout"), rollout(1.0)]
    assert main_error(rollouts) == ("timeout", "timeout broke")
    assert main_error([rollout(1.0)]) is None
    assert main_error([rollout(None, "judge"), rollout(1.0)]) == ("judge", "judge broke")


def ready(draw_id, version):
    judged_group = judged(rollout(1.0, version=version), rollout(0.0, version=version + 1)).group
    samples = group_samples(judged_group, seq_len=9, keep_zero_advantages=False)
    return ReadyGroup.of(draw_id, samples)


def test_a_batch_takes_whole_groups_stalest_first():
    batcher = Batcher(2, max_staleness=5, max_backfill=1.0)
    for draw_id, version in ((1, 3), (2, 1), (3, 2)):
        batcher.add(ready(draw_id, version))
    assert batcher.has_batch
    assert [g.draw_id for g in batcher.take()] == [2, 3]
    assert not batcher.has_batch
    with pytest.raises(AssertionError, match="wants 2 groups, 1 are ready"):
        batcher.take()


def test_past_the_backfill_a_batch_wants_fewer_groups_until_it_is_shipped():
    batcher = Batcher(8, max_staleness=5, max_backfill=0.5)
    wanted = []
    for _ in range(64):
        batcher.reject()
        wanted.append(batcher.num_wanted)
    assert wanted[:4] == [8, 8, 8, 8]
    assert (wanted[7], wanted[15], wanted[31], wanted[63]) == (4, 2, 1, 1)
    assert not batcher.has_batch
    batcher.add(ready(1, 3))
    assert [g.draw_id for g in batcher.take()] == [1]
    assert batcher.num_wanted == 8


def test_groups_that_are_all_solved_end_the_hunger_well():
    starvation = Starvation(1, 3, solved_reward=0.9)
    solved = group(rollout(1.0), rollout(1.0))
    for _ in range(3):
        assert not starvation.is_solved
        assert starvation.observe(solved, DropReason.ZERO_ADVANTAGE) is None
    assert starvation.is_solved


def test_a_sweep_removes_what_is_too_stale_by_its_oldest_token():
    batcher = Batcher(2, max_staleness=2, max_backfill=1.0)
    batcher.add(ready(1, 3))
    batcher.add(ready(2, 4))
    assert batcher.sweep(6) == []
    assert [g.draw_id for g in batcher.sweep(7)] == [1]
    assert batcher.num_ready == 1


def test_starvation_warns_after_one_batch_and_ends_after_its_limit():
    starvation = Starvation(2, 3, solved_reward=0.9)
    failed = group(rollout(None, "environment"))
    assert starvation.observe(failed, DropReason.ERRORS) is None
    assert "100% failed" in starvation.observe(failed, DropReason.ERRORS)
    for _ in range(3):
        assert starvation.observe(failed, DropReason.ERRORS) is None, "it is said once"
    with pytest.raises(UserError, match=r"6 groups \(3 batches' worth\).*look at the errors"):
        starvation.observe(failed, DropReason.ERRORS)


def test_starvation_names_truncation_and_starts_again_after_a_good_group():
    starvation = Starvation(1, 2, solved_reward=0.9)
    cut = group(rollout(0.0, is_truncated=True), rollout(0.0, is_truncated=True))
    assert "100% of the rollouts were cut at max_tokens" in starvation.observe(cut, DropReason.ZERO_ADVANTAGE)
    assert starvation.observe(group(rollout(1.0), rollout(0.0)), None) is None
    starvation.observe(cut, DropReason.ZERO_ADVANTAGE)
    with pytest.raises(UserError, match=r"raise sampling\.max_tokens"):
        starvation.observe(cut, DropReason.ZERO_ADVANTAGE)


def told(*drops, solved_reward=0.9, reward=0.25, **fields):
    """What is told once so many groups, of one rollout each, were dropped for these reasons."""
    starvation = Starvation(len(drops), 100, solved_reward=solved_reward)
    return [starvation.observe(group(rollout(reward, **fields)), drop) for drop in drops][-1]


def test_starvation_tells_the_share_of_each_reason():
    zero, errors, silent = DropReason.ZERO_ADVANTAGE, DropReason.ERRORS, DropReason.NO_TOKENS
    text = told(
        zero, zero, zero, zero, errors, errors, silent, silent, DropReason.DIFFICULTY, DropReason.SMALL_ADVANTAGE
    )
    assert "the last 10 groups (1 batches' worth)" in text
    assert "40% had equal rewards (mean 0.25), 20% were filtered by the curriculum, 20% failed, 20% s" in text
    assert "20% sampled none within seq_len; 0% of the rollouts were cut at max_tokens" in text
    assert "to train on: 100% failed; 0% of" in told(errors, reward=None, error_kind="judge"), (
        "and what is not, is not told"
    )
    assert "100% of the rollouts were cut" in told(zero, is_truncated=True)


@pytest.mark.parametrize(
    ("drops", "advice"),
    [
        (["errors", "errors", "zero", "zero"], "take tasks that the model solves sometimes"),
        (["errors", "errors", "errors", "zero", "zero"], "look at the errors"),
        (["difficulty", "small", "zero", "zero"], "take tasks that the model solves sometimes"),
        (["difficulty", "difficulty", "small", "zero"], "open the curriculum's"),
    ],
)
def test_advice_is_what_more_than_half_of_the_groups_call_for(drops, advice):
    reasons = {
        "errors": DropReason.ERRORS, "zero": DropReason.ZERO_ADVANTAGE, "difficulty": DropReason.DIFFICULTY,
        "small": DropReason.SMALL_ADVANTAGE,
    }  # fmt: skip
    assert advice in told(*(reasons[name] for name in drops))


def test_what_left_no_room_for_an_answer_is_named():
    silent = DropReason.NO_TOKENS
    assert "100% sampled none within seq_len" in told(silent, silent)
    assert "raise orchestrator.seq_len" in told(silent, silent)
    nothing = {"num_tokens": 0, "is_truncated": True}
    assert "100% sampled no token; 100%" in told(silent, silent, **nothing)
    assert "raise inference.max_model_len" in told(silent, silent, **nothing)


def test_rewards_that_differ_are_not_called_equal():
    starvation = Starvation(1, 9, solved_reward=0.9)
    text = starvation.observe(group(rollout(0.0), rollout(0.5)), DropReason.ZERO_ADVANTAGE)
    assert "100% got no credit by their algorithm (mean 0.25)" in text
    assert "algorithm_args" in text


def test_a_model_that_did_not_answer_is_named_where_groups_have_no_credit():
    starvation = Starvation(1, 9, solved_reward=0.9)
    text = starvation.observe(group(rollout(0.0)), DropReason.ERRORS, "there is no model 'zzz'")
    assert "100% failed (the last: there is no model 'zzz')" in text
    assert text.endswith("see to that model")


def test_half_of_the_rollouts_cut_is_not_yet_what_to_change():
    for reasons, advice in (((True, False), "take tasks"), ((True, True, False), "raise sampling.max_tokens")):
        starvation = Starvation(1, 9, solved_reward=0.9)
        cut = group(*(rollout(0.0, is_truncated=is_cut) for is_cut in reasons))
        assert advice in starvation.observe(cut, DropReason.ZERO_ADVANTAGE)


def test_tasks_count_as_solved_from_the_mean_reward_that_the_config_says():
    zero = DropReason.ZERO_ADVANTAGE
    assert told(zero, zero, reward=0.5, solved_reward=0.5) is None
    assert told(zero, zero, reward=0.5, solved_reward=0.75) is not None
    assert told(zero, reward=1.0) is None


def test_a_sweep_leaves_what_is_fresh_enough():
    batcher = Batcher(1, max_staleness=2, max_backfill=1.0)
    batcher.add(ready(1, 3))
    batcher.add(ready(2, 4))
    assert [g.draw_id for g in batcher.sweep(7)] == [1]
    assert [g.draw_id for g in batcher.take()] == [2]


def test_one_group_without_signal_is_always_replaced_and_a_batch_forgets_them():
    batcher = Batcher(4, max_staleness=5, max_backfill=0.1)
    batcher.reject()
    assert (batcher.num_wanted, batcher.num_rejected) == (4, 1)
    batcher.reject()
    assert (batcher.num_wanted, batcher.num_rejected) == (2, 2)
    batcher.add(ready(1, 3))
    batcher.add(ready(2, 3))
    batcher.take()
    assert (batcher.num_wanted, batcher.num_rejected) == (4, 0)
