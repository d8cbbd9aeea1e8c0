"""One evaluation as it is published: rollouts of tasks with a description, kept in a folder, resumed where it stopped.

Parts: `Subject` (what is evaluated, in words), `Evaluation`. The running is `EvalRunner`'s, the folder
`EvaluationFolder`'s; here they become what `generate` and `evaluate` of verifiers promise. Invariants: a finished
rollout is kept before the next callback sees it (rollouts that are scored together, when their group is), and a resumed
evaluation runs only what is missing or failed; whatever ends it, the published files describe what is kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mettle.errors import StorageError
from mettle.evals.facts import RolloutFacts, facts_of
from mettle.evals.folder import EvaluationFolder, new_results_path
from mettle.evals.generated import GenerateOutputs
from mettle.evals.options import EvalOptions
from mettle.evals.output import output_row
from mettle.evals.refusals import Refusals
from mettle.evals.report import plain
from mettle.evals.resume import check_same, kept_rollouts
from mettle.evals.runner import EvalRunner, EvalTask, StoreKeeper, example_key, requests_for, split
from mettle.evals.source import GroupRequest, RolloutSource
from mettle.evals.summary import Summary
from mettle.processes.clock import steady_time
from mettle.records.tasks import RolloutRecord
from mettle.storage.evals import EvalPlan


@dataclass(frozen=True, slots=True)
class Subject:
    """What is evaluated. `is_split`: rollouts of a group need nothing of each other, neither scores nor a request."""

    env_id: str
    model: str
    env_args: Mapping[str, Any] = field(default_factory=dict)
    base_url: str = ""
    sampling_args: Mapping[str, Any] = field(default_factory=dict)
    pass_threshold: float = 0.5
    pass_on: Mapping[str, float] | None = None
    tools: list[dict[str, Any]] | None = None
    version_info: Mapping[str, Any] = field(default_factory=dict)
    is_split: bool = True
    is_scored_together: bool = False
    title: str = ""


class Evaluation:
    """One call of `generate`. `inputs` are the rows of `tasks` as the callbacks of verifiers see them."""

    def __init__(
        self,
        source: RolloutSource,
        tasks: Sequence[EvalTask],
        inputs: Sequence[Any],
        subject: Subject,
        options: EvalOptions,
    ) -> None:
        self.source, self.tasks, self.inputs = source, tasks, inputs
        self.subject, self.options = subject, options
        self.rollouts_per_example = options.rollouts_per_example or max((t.num_rollouts for t in tasks), default=1)
        self.is_saved = bool(options.save_results or options.results_path)
        self.keep_outputs = options.keep_outputs or not self.is_saved
        self.on_progress = _as_list(options.on_progress)
        self.outputs: list[dict[str, Any]] = []
        self.facts: list[RolloutFacts] = []
        self.summary = Summary(self.rollouts_per_example, subject.pass_threshold, options.price, subject.pass_on)
        self._new_rows: dict[str, dict[str, Any]] = {}
        self._folder: EvaluationFolder | None = None
        self._started = steady_time()
        self._time_before = 0.0

    async def run(self) -> GenerateOutputs:
        """Run everything that is missing; all outputs, old and new, with the metadata."""
        folder = self._folder = EvaluationFolder(self._path()) if self.is_saved else None
        keeper = None
        results = None
        try:
            requests = self._plan(folder)
            keeper = folder.keeper() if folder is not None else None
            await _notify(self.options.on_start, self.inputs, [row for request in requests for row in request.rows])
            await _notify(self.options.on_kept, len(self.inputs), self.facts)
            options = self.options
            runner = EvalRunner(
                self.source, keeper=keeper, max_groups=options.max_concurrent, slots=options.slots,
                is_split=self.subject.is_split, refusals=Refusals(), on_rollouts=self._count,
                on_group=self._tell if self.on_progress or options.on_log else None,
            )  # fmt: skip
            await runner.run(requests)
            results = self._results()
        finally:
            if folder is not None:
                self._leave(folder, keeper, results)
        return results

    def metadata(self) -> dict[str, Any]:
        """What was run and what came of it."""
        subject, options = self.subject, self.options
        return {
            "env_id": subject.env_id,
            "env_args": subject.env_args,
            "model": subject.model,
            "base_url": subject.base_url,
            "num_examples": len(self.tasks),
            "rollouts_per_example": self.rollouts_per_example,
            "shuffle": options.shuffle,
            "shuffle_seed": options.shuffle_seed,
            "sampling_args": subject.sampling_args,
            "time": self._time_before + steady_time() - self._started,
            **self.summary.metadata(),
            "version_info": subject.version_info,
            "state_columns": list(options.state_columns or ()),
            "tools": subject.tools,
            **options.extra_metadata,
        }

    def _path(self) -> Path:
        if self.options.results_path is not None:
            return Path(self.options.results_path)
        return new_results_path(self.subject.title or self.subject.env_id, self.subject.model)

    def _plan(self, folder: EvaluationFolder | None) -> list[GroupRequest]:
        """What is left to run, once what was asked for is written down."""
        env_id, is_alone = self.subject.env_id, self.options.independent_scoring
        if folder is None:
            return self._units(requests_for(self.tasks, env=env_id, prefix="e"))
        saved = folder.metadata
        if saved is not None and not folder.has_rewards():
            # Of an attempt in which everything failed there is nothing to go on with, and nothing to protect.
            folder.start_anew()
            saved = None
        if saved is not None:
            check_same(folder.path, saved, self.metadata())
            self._time_before = float(saved["time"]) if isinstance(saved.get("time"), int | float) else 0.0
        plan = EvalPlan(
            self.options.kind, env_id, len(self.tasks), len(self.inputs), model=self.subject.model,
            metadata={**(saved or {}), **self.metadata()},
        )  # fmt: skip
        is_whole = self.subject.is_scored_together and not is_alone
        stored = {row.rollout_id: record for row in folder.begin(plan) if (record := folder.record(row)) is not None}
        kept = kept_rollouts(folder.path, list(stored.values()), self.tasks, is_whole_groups=is_whole)
        done: dict[str, set[int]] = {}
        for record in kept:
            done.setdefault(example_key(record.example_id), set()).add(record.position or 0)
            self._add(record)
        requests = requests_for(
            self.tasks, env=env_id, prefix=f"e{folder.eval_id}", done=done, is_whole_groups=is_whole
        )
        return self._units(requests)

    def _units(self, requests: list[GroupRequest]) -> list[GroupRequest]:
        """With independent scoring each rollout is a group of its own."""
        return [one for request in requests for one in split(request)] if self.options.independent_scoring else requests

    def _count(self, records: Sequence[RolloutRecord]) -> None:
        for record in records:
            row = self._add(record)
            if self.on_progress and row is not None:
                self._new_rows[record.rollout_id] = row
            if self.options.on_rollout is not None:
                self.options.on_rollout(self.facts[-1])

    def _add(self, record: RolloutRecord) -> dict[str, Any] | None:
        facts = facts_of(record)
        self.facts.append(facts)
        self.summary.add(facts, record.token_usage)
        if self._folder is None and not self.keep_outputs and not self.on_progress:
            return None
        row = output_row(record)
        if self.keep_outputs:
            self.outputs.append(row)
        if self._folder is not None:
            self._folder.add(row)
        return row

    async def _tell(self, records: Sequence[RolloutRecord]) -> None:
        await _notify(self.options.on_log, f"{len(self.facts)} of {len(self.inputs)} rollouts")
        if self.on_progress:
            new = [self._new_rows.pop(record.rollout_id) for record in records]
            metadata = self.metadata()
            for callback in self.on_progress:
                await _notify(callback, self.outputs, new, metadata)

    def _results(self) -> GenerateOutputs:
        results = GenerateOutputs(outputs=self.outputs, metadata=self.metadata())
        results.facts, results.price = self.facts, self.summary.price
        return results

    def _leave(self, folder: EvaluationFolder, keeper: StoreKeeper | None, results: GenerateOutputs | None) -> None:
        """Whatever ended the evaluation, the store and the published files say how far it came."""
        try:
            if keeper is None:
                return
            if results is not None:
                stats = results.stats
                folder.end(
                    {**results["metadata"], "stats": plain(stats)},
                    is_finished=True,
                    mean=stats.reward.mean if stats.reward else None,
                    interval=stats.reward.interval if stats.reward else None,
                    metrics={name: found.mean for name, found in stats.metrics.items()},
                )
                return
            with suppress(StorageError):  # The disk is full: the error that says so is on its way already.
                keeper.flush()
                folder.end(self.metadata(), is_finished=False)
        finally:
            folder.close()


def _as_list(callbacks: Any) -> list[Callable[..., Any]]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]


async def _notify(callback: Callable[..., Any] | None, *args: Any) -> None:
    if callback is not None:
        result = callback(*args)
        if inspect.isawaitable(result):
            await result
