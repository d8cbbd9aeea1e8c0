"""What becomes of a group that came back: trained, dropped with a reason, or tried again.

A group needs at least half of its rollouts (and as many as the algorithm compares) to be worth training on; with fewer,
its errors decide whether to try it again, as they do when a frozen model that the algorithm asks has failed. Whether a
group carries a signal is read off its credit, and so is whether it is worth training on (`AdmissionGate`); a group that
is not has moved the algorithm's baselines and the curriculum all the same.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mettle.errors import MettleError, RolloutError, UserError
from mettle.evals.estimator import mean_of
from mettle.orchestrator.algorithms import Algorithm, RunAlgorithms
from mettle.orchestrator.config import CurriculumConfig, OrchestratorConfig, RetryConfig
from mettle.orchestrator.credit import checked, has_signal, is_imitated, largest_advantage, mean_advantage
from mettle.orchestrator.dispatcher import Blame
from mettle.orchestrator.samples import group_samples
from mettle.orchestrator.services import Services
from mettle.records.tasks import Credit, DropReason, GroupRecord, RolloutRecord
from mettle.records.tokens import Sample

logger = logging.getLogger(__name__)

ENVIRONMENT_KINDS = frozenset({"environment", "judge"})
LOSSES = frozenset({"NoService"})
"""Errors, by the names of their classes as records have them, that say nothing of what was rolled out."""
WORKER_ERRORS = frozenset({"WorkerDied"})


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """`group` carries its credit. At most one of `drop` and `is_retried` is set; neither means admitted.

    `failure` is what a frozen model has failed with that the algorithm asked; `blame` is what a failure is laid to.
    """

    group: GroupRecord
    drop: DropReason | None = None
    is_retried: bool = False
    failure: str = ""
    blame: Blame = Blame.TASK

    @property
    def is_admitted(self) -> bool:
        """True when the group is to be trained."""
        return self.drop is None and not self.is_retried


@dataclass(frozen=True, slots=True)
class AdmissionGate:
    """Which groups of an environment are worth training on; see `CurriculumConfig`. By default all are."""

    admit_above: float = -math.inf
    admit_below: float = math.inf
    min_advantage: float = 0.0

    @classmethod
    def of(cls, config: CurriculumConfig) -> AdmissionGate:
        above, below = config.admit_above, config.admit_below
        return cls(-math.inf if above is None else above, math.inf if below is None else below, config.min_advantage)

    def closed_by(self, group: GroupRecord) -> DropReason | None:
        """Why a group with its credit is not admitted; None when it is."""
        if not self.admit_above < mean_of(group.rewards) < self.admit_below:
            return DropReason.DIFFICULTY
        if self.min_advantage and not any(_is_above(self.min_advantage, rollout) for rollout in group.rollouts):
            return DropReason.SMALL_ADVANTAGE
        return None


def _is_above(limit: float, rollout: RolloutRecord) -> bool:
    if rollout.credit is None:
        return False
    return is_imitated(rollout.credit) or largest_advantage(rollout.credit, rollout) > limit


class Admission:
    """What a run does with its groups: the algorithms, the models that they ask, and the rules."""

    def __init__(
        self,
        algorithms: RunAlgorithms,
        services: Services,
        retry: RetryConfig,
        *,
        seq_len: int,
        filter_zero_advantages: bool,
        gates: Mapping[str, AdmissionGate] | None = None,
    ) -> None:
        self._gates = gates or {}
        self.algorithms = algorithms
        self.retry = retry
        self._services = services
        self.seq_len = seq_len
        self._filter_zero_advantages = filter_zero_advantages

    @classmethod
    def of(cls, config: OrchestratorConfig, algorithms: RunAlgorithms, services: Services) -> Admission:
        """As a run is configured."""
        return cls(
            algorithms,
            services,
            config.retry,
            seq_len=config.seq_len,
            filter_zero_advantages=config.filter_zero_advantages,
            gates={env.name: AdmissionGate.of(config.curriculum_of(env.name)) for env in config.envs},
        )

    async def judge(self, group: GroupRecord, failures: Mapping[Blame, int]) -> GroupVerdict:
        """What becomes of a group that came back; `failures` counts earlier failed attempts of its task."""
        return await judge_group(
            group,
            self.algorithms.of(group.draw.env_id),
            self._services,
            retry=self.retry,
            failures=failures,
            filter_zero_advantages=self._filter_zero_advantages,
            gate=self._gates.get(group.draw.env_id, AdmissionGate()),
        )

    def samples_of(self, group: GroupRecord) -> list[Sample]:
        """What of a scored group trains."""
        return group_samples(group, seq_len=self.seq_len, keep_zero_advantages=not self._filter_zero_advantages)


EVERY_GROUP = AdmissionGate()


async def judge_group(
    group: GroupRecord,
    algorithm: Algorithm,
    services: Services,
    *,
    retry: RetryConfig,
    failures: Mapping[Blame, int],
    filter_zero_advantages: bool,
    gate: AdmissionGate = EVERY_GROUP,
) -> GroupVerdict:
    """`failures` counts earlier failed attempts of the same task.

    Raises: UserError when the algorithm itself is wrong.
    """
    survivors = [r for r in group.rollouts if r.reward is not None]
    needed = max(algorithm.min_group_size, (len(group.rollouts) + 1) // 2)
    if len(survivors) < min(needed, len(group.rollouts)):
        lost = [r for r in group.rollouts if r.reward is None]
        return _failed(group, {r.error_kind for r in lost}, retry, failures, blame_of(lost))
    if not any(r.num_completion_tokens for r in survivors):
        return GroupVerdict(group, DropReason.NO_TOKENS)
    try:
        credits = checked(await algorithm.credit(group, services), group)
    except RolloutError as error:
        logger.warning("group %d has no credit: %s", group.draw.draw_id, error)
        return replace(_failed(group, {error.kind}, retry, failures, Blame.TASK), failure=str(error))
    except MettleError:
        raise
    except Exception as error:
        name, env = type(algorithm).__name__, group.draw.env_id
        raise UserError(f"algorithm {name} failed on a group of {env!r}: {type(error).__name__}: {error}") from error
    scored = replace(group, rollouts=tuple(map(_credited, group.rollouts, credits)))
    if filter_zero_advantages and not any(r.credit is not None and has_signal(r.credit, r) for r in scored.rollouts):
        return GroupVerdict(scored, DropReason.ZERO_ADVANTAGE)
    return GroupVerdict(scored, gate.closed_by(scored))


def _failed(
    group: GroupRecord, kinds: Collection[str | None], retry: RetryConfig, failures: Mapping[Blame, int], blame: Blame
) -> GroupVerdict:
    is_worthwhile = bool(set(kinds) & set(retry.retried)) and failures.get(blame, 0) + 1 < retry.max_attempts
    is_retried = is_worthwhile or blame is Blame.RUN
    return GroupVerdict(group, None if is_retried else DropReason.ERRORS, is_retried=is_retried, blame=blame)


def blame_of(failed: Sequence[RolloutRecord]) -> Blame:
    """What the failure of these rollouts of a group is laid to."""
    raised = {name for rollout in failed for name in (rollout.error_chain or rollout.error_type or "").split(" -> ")}
    return Blame.RUN if raised & LOSSES else Blame.WORKER if raised & WORKER_ERRORS else Blame.TASK


def _credited(rollout: RolloutRecord, credit: Credit | None) -> RolloutRecord:
    return replace(rollout, credit=credit, advantage=None if credit is None else mean_advantage(credit, rollout))


def main_error(rollouts: Sequence[RolloutRecord]) -> tuple[str, str] | None:
    """(kind, message) of the most frequent kind of error, with its first message; None when nothing failed."""
    failed = [(r.error_kind, r.error or "") for r in rollouts if r.error_kind is not None]
    if not failed:
        return None
    kind = Counter(kind for kind, _ in failed).most_common(1)[0][0]
    return kind, next(message for found, message in failed if found == kind)


class FailureStreak:
    """Groups in a row in which the environment or its rewards failed every rollout."""

    def __init__(self) -> None:
        self.length = 0
        self.first_error = ""

    def observe(self, group: GroupRecord) -> int:
        """Take a finished group into account; returns the length of the streak. Other failures leave it alone."""
        failed = {r.error_kind for r in group.rollouts if r.reward is None}
        if len(group.rewards) > 0:
            self.length = 0
        elif failed and failed <= ENVIRONMENT_KINDS:
            found = main_error(group.rollouts)
            if self.length == 0 and found is not None:
                self.first_error = f"{found[0]}: {found[1]}"
            self.length += 1
        return self.length
