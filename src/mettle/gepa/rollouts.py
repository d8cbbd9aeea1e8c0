"""Rollouts for a search that runs in a thread of its own: an event loop beside it, bounded, written down one by one.

Parts: `SearchLoop`, `Rollouts`. The library calls `evaluate` and waits; the rollouts run on our loop, where the clients
live. Invariants: at most `max_concurrent` rollouts at a time; a rollout is in the store before anybody is told of it;
leaving the thread's block closes clients and environment.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any, TypeVar

from mettle.clients.base import Client
from mettle.envs.environment_rollouts import EnvironmentRollouts
from mettle.evals.estimator import mean_of
from mettle.evals.refusals import Refusals
from mettle.evals.runner import EvalRunner, first_of
from mettle.evals.source import GroupRequest
from mettle.gepa.journal import PromptAttempt, PromptJournal, candidate_hash
from mettle.gepa.rows import SYSTEM_PROMPT, TOOL_PREFIX, Row, with_prompt
from mettle.processes.loop_thread import LoopThread
from mettle.records.messages import Tool
from mettle.records.tasks import RolloutRecord

T = TypeVar("T")


class SearchLoop:
    """The event loop beside a search. Ctrl-C in the thread that waits cancels what it waits for."""

    def __init__(self) -> None:
        self._thread = LoopThread("mettle-gepa")

    def __enter__(self) -> SearchLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end on the loop."""
        future = self._thread.submit(work)
        try:
            return future.result()
        except CancelledError as error:
            raise KeyboardInterrupt from error
        except BaseExceptionGroup as failures:
            raise first_of(failures) from None
        finally:
            if not future.done():
                future.cancel()


class Rollouts:
    """Runs rows of one environment under candidates. `on_attempt` is told of each rollout, new or taken over."""

    def __init__(
        self,
        env: Any,
        client: Client,
        model: str,
        sampling_args: Mapping[str, Any],
        journal: PromptJournal,
        *,
        max_concurrent: int,
        max_retries: int,
        state_columns: Sequence[str],
        on_attempt: Callable[[PromptAttempt], None],
    ) -> None:
        self.env, self.client, self.journal = env, client, journal
        self._source = EnvironmentRollouts(
            env, client, model, {**env.sampling_args, **sampling_args},
            is_split=False, max_retries=max_retries, columns=tuple(state_columns),
        )  # fmt: skip
        self._max_concurrent = max_concurrent
        self._on_attempt = on_attempt
        self._refusals = Refusals()

    async def run(self, rows: Sequence[tuple[str, Row]], candidate: Mapping[str, str]) -> list[PromptAttempt]:
        """One attempt for each of `rows`, named rows of the environment, in their order.

        Raises: UserError when an endpoint refuses for good what every rollout asks.
        """
        name = candidate_hash(candidate)
        attempts: dict[int, PromptAttempt] = {}
        requests: list[GroupRequest] = []
        places: dict[str, int] = {}
        for place, (row_id, row) in enumerate(rows):
            found = self.journal.take(name, row_id)
            if found is not None:
                attempts[place] = found
                self._on_attempt(found)
                continue
            requests.append(self.journal.request(candidate, row_id, with_prompt(row, candidate[SYSTEM_PROMPT])))
            places[requests[-1].rollouts[0][0]] = place

        def note(records: Sequence[RolloutRecord]) -> None:
            for record in records:
                place = places[record.rollout_id]
                attempts[place] = self.journal.add(name, rows[place][0], record)
                self._on_attempt(attempts[place])

        if requests:
            runner = EvalRunner(
                self._source, keeper=self.journal.keeper(candidate, rows[0][0], len(requests)),
                max_groups=self._max_concurrent, refusals=self._refusals, on_rollouts=note,
            )  # fmt: skip
            with self._described(candidate):
                await runner.run(requests)
        return [attempts[place] for place in range(len(rows))]

    async def close(self) -> None:
        """Let go of the endpoint and of what the environment holds."""
        await self.client.close()
        await self.env.teardown()

    @contextmanager
    def _described(self, candidate: Mapping[str, str]) -> Iterator[None]:
        """While the block runs, the environment's tools are described as the candidate describes them."""
        before: list[Tool] = self.env.tool_defs
        texts = {key.removeprefix(TOOL_PREFIX): text for key, text in candidate.items() if key.startswith(TOOL_PREFIX)}
        if texts:
            self.env.tool_defs = [
                Tool({**tool, "description": texts.get(tool["name"], tool["description"])}) for tool in before
            ]
        try:
            yield
        finally:
            self.env.tool_defs = before


def without_reward(attempts: Sequence[PromptAttempt]) -> list[PromptAttempt]:
    """The attempts that failed."""
    return [attempt for attempt in attempts if attempt.reward is None]


def neutral(attempts: Sequence[PromptAttempt]) -> list[float]:
    """Scores for the library, which knows no missing ones: an attempt that failed gets the mean of those that did not.

    So it moves neither a sum that is compared nor an average. Without any reward there is no neutral score.
    """
    rewards = [attempt.reward for attempt in attempts if attempt.reward is not None]
    assert rewards, "a batch without any reward is refused before it is scored"
    mean = mean_of(rewards)
    return [mean if attempt.reward is None else attempt.reward for attempt in attempts]
