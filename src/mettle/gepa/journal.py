"""What was evaluated and what was written by reflection, in the run's store: a run that is killed pays nothing twice.

Parts: `PromptAttempt` (one rollout under one candidate), `PromptJournal`. A candidate's rollouts are an evaluation of
the store (`search`, or `held_out` for the rows that the search never saw); a text of the reflection is an event.
Attempts of one candidate on one row are separate draws: `take` hands out each once, and the library's own state
remembers how many it had taken (`counts`), so that a resumed run takes up exactly what the killed one did not use.
Invariants: one process writes; a rollout is in the store before anybody acts on it; an attempt without a reward is
never handed out again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mettle.errors import StorageError
from mettle.evals.estimator import mean_of
from mettle.evals.output import task_key_of
from mettle.evals.runner import StoreKeeper
from mettle.evals.source import GroupRequest
from mettle.records.tasks import RolloutRecord
from mettle.storage.claim import FolderClaim
from mettle.storage.evals import FINISHED, INTERRUPTED, EvalPlan, EvalStore, read_evals
from mettle.storage.ledger import Ledger
from mettle.storage.rollouts import read_rollout, rollout_rows
from mettle.storage.run_dir import RunDir
from mettle.storage.shards import ShardWriter

logger = logging.getLogger(__name__)

SEARCH, HELD_OUT, HELD_OUT_ROWS = "search", "held_out", "test:"
REFLECTION = "reflection"
EVENTS_AT_A_TIME = 1000


@dataclass(frozen=True, slots=True)
class PromptAttempt:
    """One rollout. `reward` is None where it failed, with the reason in `error`; `record` is what reflection reads."""

    row: str
    candidate: str
    reward: float | None
    error: str | None = None
    record: dict[str, Any] = field(default_factory=dict)
    input_tokens: float = 0.0
    output_tokens: float = 0.0


def candidate_hash(candidate: Mapping[str, str]) -> str:
    """What tells candidates apart: their texts."""
    return hashlib.sha256(json.dumps(sorted(candidate.items())).encode()).hexdigest()[:16]


class PromptJournal:
    """The attempts and texts of one run directory. `attempt_of` makes an attempt of (row, candidate, rollout).

    Raises: UserError when another process writes there.
    """

    def __init__(
        self, folder: Path, env_id: str, model: str, attempt_of: Callable[[str, str, RolloutRecord], PromptAttempt]
    ) -> None:
        self._env_id, self._model, self._attempt_of = env_id, model, attempt_of
        self._attempts: dict[str, list[PromptAttempt]] = defaultdict(list)
        self._texts: dict[str, list[str]] = defaultdict(list)
        self._num_rollouts: Counter[str] = Counter()
        self._evals: dict[tuple[str, str], int] = {}
        self._planned: Counter[int] = Counter()
        self.counts: dict[str, int] = {}
        self.num_errors = 0
        self.is_finished = False
        self._run_dir = RunDir(folder)
        self._claim = FolderClaim(folder)
        try:
            self._ledger = Ledger(self._run_dir.ledger)
            self._store = EvalStore(self._ledger.database, ShardWriter(self._run_dir.rollouts))
            self._read()
        except BaseException:
            self._claim.release()
            raise

    def take(self, candidate: str, row: str) -> PromptAttempt | None:
        """The next attempt that is there already; None when a rollout must be run."""
        found = self._next(_key(candidate, row), self._attempts)
        return found if isinstance(found, PromptAttempt) else None

    def request(self, candidate: Mapping[str, str], row: str, task: Mapping[str, Any]) -> GroupRequest:
        """One more rollout of `row`, which begins as `task`."""
        name = candidate_hash(candidate)
        position = self._num_rollouts[_key(name, row)]
        self._num_rollouts[_key(name, row)] += 1
        eval_id = self._eval_of(name, row, candidate)
        return GroupRequest(
            self._env_id, row, f"e{eval_id}-{row}", 1,
            is_eval=True, positions=(position,), uid=task_key_of(task), rows=(task,),
        )  # fmt: skip

    def keeper(self, candidate: Mapping[str, str], row: str, num_more: int) -> StoreKeeper:
        """Where rollouts of this candidate go, of which `num_more` are wanted now."""
        eval_id = self._eval_of(candidate_hash(candidate), row, candidate)
        self._planned[eval_id] += num_more
        self._store.begin(self._plan(_kind(row), candidate, self._planned[eval_id]), eval_id)
        return StoreKeeper(self._store, eval_id)

    def add(self, candidate: str, row: str, rollout: RolloutRecord) -> PromptAttempt:
        """Take note of a rollout that is in the store, as taken."""
        attempt = self._attempt_of(row, candidate, rollout)
        self._hold(attempt)
        if attempt.reward is not None:
            key = _key(candidate, row)
            self.counts[key] = self.counts.get(key, 0) + 1
        return attempt

    def take_text(self, prompt: str) -> str | None:
        """The next text that reflection wrote for this prompt; None when it must be asked."""
        found = self._next(_prompt_key(prompt), self._texts)
        return found if isinstance(found, str) else None

    def add_text(self, prompt: str, text: str) -> None:
        """Write down what reflection wrote, as taken."""
        key = _prompt_key(prompt)
        self._ledger.journal.event("gepa", REFLECTION, text, prompt=key)
        self._texts[key].append(text)
        self.counts[key] = self.counts.get(key, 0) + 1

    def has_reward(self, candidate: str, row: str) -> bool:
        """Whether some attempt of this candidate on this row came to a reward."""
        return bool(self._attempts.get(_key(candidate, row)))

    def tokens(self) -> tuple[float, float]:
        """Tokens read and written by all attempts with a reward."""
        attempts = [attempt for found in self._attempts.values() for attempt in found]
        return sum(a.input_tokens for a in attempts), sum(a.output_tokens for a in attempts)

    @property
    def num_attempts(self) -> int:
        """Rollouts that came to a reward."""
        return sum(map(len, self._attempts.values()))

    def close(self) -> None:
        """Say how the evaluations ended, and let another process write."""
        try:
            for eval_id in self._planned:
                rewards = [row.reward for row in rollout_rows(self._ledger.database, eval_id) if row.reward is not None]
                state = FINISHED if self.is_finished else INTERRUPTED
                self._store.end(eval_id, state=state, mean=mean_of(rewards) if rewards else None)
        except StorageError as error:
            logger.warning("%s", error)
        finally:
            self._ledger.close()
            self._claim.release()

    def _eval_of(self, name: str, row: str, candidate: Mapping[str, str]) -> int:
        key = (name, _kind(row))
        if key not in self._evals:
            self._evals[key] = self._store.begin(self._plan(key[1], candidate, 0))
        return self._evals[key]

    def _plan(self, kind: str, candidate: Mapping[str, str], num_rollouts: int) -> EvalPlan:
        about = {"env_id": self._env_id, "model": self._model, "candidate": dict(candidate)}
        return EvalPlan(kind, self._env_id, num_rollouts, num_rollouts, model=self._model, metadata=about)

    def _next(self, key: str, held: Mapping[str, list[Any]]) -> Any:
        taken = self.counts.get(key, 0)
        found = held.get(key, ())
        if taken >= len(found):
            return None
        self.counts[key] = taken + 1
        return found[taken]

    def _hold(self, attempt: PromptAttempt) -> None:
        if attempt.reward is None:
            self.num_errors += 1
        else:
            self._attempts[_key(attempt.candidate, attempt.row)].append(attempt)

    def _read(self) -> None:
        for found in read_evals(self._ledger.database):
            name = candidate_hash(found.metadata["candidate"])
            self._evals[(name, found.kind)] = found.eval_id
            for row in rollout_rows(self._ledger.database, found.eval_id):
                self._planned[found.eval_id] += 1
                self._num_rollouts[_key(name, row.example_id)] += 1
                try:
                    rollout = read_rollout(self._run_dir.rollouts, row)
                except StorageError as error:
                    logger.warning("%s; it will be run again", error)
                    continue
                self._hold(self._attempt_of(row.example_id, name, rollout))
        last = 0
        while events := self._ledger.journal.events(after_id=last, kind=REFLECTION, limit=EVENTS_AT_A_TIME):
            last = events[-1].event_id
            for event in events:
                self._texts[event.data["prompt"]].append(event.message)


def _kind(row: str) -> str:
    return HELD_OUT if row.startswith(HELD_OUT_ROWS) else SEARCH


def _key(candidate: str, row: str) -> str:
    return f"{candidate}/{row}"


def _prompt_key(prompt: str) -> str:
    return hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:16]
