"""Running an environment over many rows: rollouts side by side, each saved as it finishes, resumed where it stopped.

Parts: `Evaluation`, one call of `generate`; what it runs is an `Evaluated`. A group is the rows of one `example_id`.
Invariants: a finished rollout is on disk before the next callback sees it (rollouts that are scored together, when
their group is), and a resumed evaluation runs only what is missing or failed; one rollout's failure never ends the
evaluation, a full disk does.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from mettle.clients.factory import client_from
from mettle.clients.prices import Price
from mettle.envs.evaluated import Evaluated
from mettle.envs.rollout_record import output_of
from mettle.errors import StorageError, UserError
from mettle.evals.facts import RolloutFacts, facts_of_row
from mettle.evals.generated import GenerateOutputs
from mettle.evals.output import task_key_of
from mettle.evals.refusals import Refusals
from mettle.evals.report import plain
from mettle.evals.results import ResultsFolder, new_results_path
from mettle.evals.resume import Row, check_same, count_by_example, example_of, take_over
from mettle.evals.slots import Slots
from mettle.evals.summary import Summary

METADATA_INTERVAL_S = 0.5


class Evaluation:
    """One call of `generate`. `max_concurrent` bounds groups, or rollouts with `independent_scoring`; -1: no bound.

    `slots` bounds rollouts, over every evaluation that shares it. `extra_metadata` are top-level keys of the caller's.
    Without `keep_outputs` the rows are only on disk, and `outputs` stays empty. `on_kept` is told how many rollouts
    there are and which were taken over, `on_rollout` of each that ends, the callbacks of verifiers of each group.
    """

    def __init__(
        self,
        env: Evaluated,
        inputs: Any,
        client: Any,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        *,
        max_concurrent: int = -1,
        results_path: str | Path | None = None,
        state_columns: Sequence[str] | None = None,
        save_results: bool = False,
        independent_scoring: bool = False,
        max_retries: int = 0,
        rollouts_per_example: int | None = None,
        shuffle: bool = False,
        shuffle_seed: int | None = None,
        slots: Slots | None = None,
        price: Price | None = None,
        keep_outputs: bool = True,
        extra_metadata: Mapping[str, Any] | None = None,
        on_start: Callable[..., Any] | None = None,
        on_kept: Callable[[int, list[RolloutFacts]], Any] | None = None,
        on_progress: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        on_rollout: Callable[[RolloutFacts], Any] | None = None,
        on_log: Callable[[str], Any] | None = None,
        **_: Any,
    ) -> None:
        self.env = env
        self.inputs: list[Row] = list(inputs.to_list() if hasattr(inputs, "to_list") else inputs)
        self.client = client_from(client)
        self.model = model
        self.sampling_args = {**env.sampling_args, **(sampling_args or {})}
        self.max_concurrent = max_concurrent
        self.state_columns = list(state_columns or ())
        self.independent_scoring = independent_scoring
        self.max_retries = max_retries
        counts = count_by_example(self.inputs)
        self.num_examples = len(counts)
        self.rollouts_per_example = rollouts_per_example or max(counts.values(), default=1)
        self.shuffle, self.shuffle_seed = shuffle, shuffle_seed
        self.slots = slots
        self.keep_outputs = keep_outputs or not (save_results or results_path)
        self.extra_metadata = dict(extra_metadata or {})
        self.on_start = on_start
        self.on_kept = on_kept
        self.on_progress = _as_list(on_progress)
        self.on_rollout = on_rollout
        self.on_log = on_log
        self.outputs: list[dict[str, Any]] = []
        self.facts: list[RolloutFacts] = []
        self.summary = Summary(self.rollouts_per_example, env.pass_threshold, price)
        self.folder = self._folder(results_path) if save_results or results_path else None
        self._is_split = independent_scoring or self._can_split()
        self._started = time.time()
        self._time_before = 0.0
        self._metadata_written = 0.0
        self._refusals = Refusals()

    async def run(self) -> GenerateOutputs:
        """Run everything that is missing; all outputs, old and new, with the metadata."""
        remaining = self._resume()
        await _notify(self.on_start, self.inputs, remaining)
        await _notify(self.on_kept, len(self.inputs), self.facts)
        groups = [[row] for row in remaining] if self.independent_scoring else _grouped(remaining)
        num_workers = min(len(groups), self.max_concurrent) if self.max_concurrent > 0 else len(groups)
        pending = iter(groups)
        self._write_metadata(force=True)
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(num_workers):
                    workers.create_task(self._work(pending))
        except BaseExceptionGroup as failures:
            raise _first_of(failures) from None
        finally:
            self._leave()
        results = GenerateOutputs(outputs=self.outputs, metadata=self.metadata())
        results.facts, results.price = self.facts, self.summary.price
        self._write_metadata(force=True, stats=plain(results.stats))
        return results

    def metadata(self) -> dict[str, Any]:
        """What was run and what came of it."""
        return {
            "env_id": self.env.env_id,
            "env_args": self.env.env_args,
            "model": self.model,
            "base_url": _base_url(self.client),
            "num_examples": self.num_examples,
            "rollouts_per_example": self.rollouts_per_example,
            "shuffle": self.shuffle,
            "shuffle_seed": self.shuffle_seed,
            "sampling_args": self.sampling_args,
            "time": self._time_before + time.time() - self._started,
            **self.summary.metadata(),
            "version_info": _version_info(self.env),
            "state_columns": self.state_columns,
            "tools": [dict(tool) for tool in self.env.tool_defs] or None,
            **self.extra_metadata,
        }

    async def _work(self, pending: Iterator[list[Row]]) -> None:
        for rows in pending:
            if self._is_split:
                async with asyncio.TaskGroup() as members:
                    tasks = [members.create_task(self._alone(row)) for row in rows]
                outputs = [task.result() for task in tasks]
            else:
                outputs = await self._together(rows)
            await self._tell(outputs)

    async def _alone(self, row: Row) -> dict[str, Any]:
        """One rollout that is scored by itself: it is kept as soon as it is done, whatever its siblings do."""
        async with self._take(1):
            state = await self.env.run_rollout(
                row, self.client, self.model, self.sampling_args, max_retries=self.max_retries
            )
        output = output_of(state, self.state_columns, task_key_of(row))
        self._keep([output])
        return output

    async def _together(self, rows: list[Row]) -> list[dict[str, Any]]:
        async with self._take(len(rows)):
            states = await self.env.run_group(
                rows, self.client, self.model, self.sampling_args, max_retries=self.max_retries
            )
        pairs = zip(states, rows, strict=True)
        outputs = [output_of(state, self.state_columns, task_key_of(row)) for state, row in pairs]
        self._keep(outputs)
        return outputs

    def _take(self, num: int) -> Any:
        return self.slots.take(num) if self.slots is not None else nullcontext()

    def _keep(self, outputs: list[dict[str, Any]]) -> None:
        if self.folder is not None:
            self.folder.append(outputs)
        for output in outputs:
            self._count(output)
            if self.on_rollout is not None:
                self.on_rollout(self.facts[-1])
        self._write_metadata()
        self._refusals.see(outputs)

    def _count(self, output: dict[str, Any]) -> None:
        facts = facts_of_row(output)
        self.facts.append(facts)
        self.summary.add(facts, output.get("token_usage"))
        if self.keep_outputs:
            self.outputs.append(output)

    async def _tell(self, outputs: list[dict[str, Any]]) -> None:
        if self.on_log is not None:
            await _notify(self.on_log, f"{len(self.facts)} of {len(self.inputs)} rollouts")
        if self.on_progress:
            metadata = self.metadata()
            for callback in self.on_progress:
                await _notify(callback, self.outputs, outputs, metadata)

    def _write_metadata(self, *, force: bool = False, **extra: Any) -> None:
        if self.folder is None or not (force or time.monotonic() - self._metadata_written > METADATA_INTERVAL_S):
            return
        self.folder.write_metadata({**self.metadata(), **extra})
        self._metadata_written = time.monotonic()

    def _leave(self) -> None:
        """Whatever ended the evaluation, its metadata describes the rows that are on disk."""
        if self.folder is not None:
            with suppress(StorageError):  # The disk is full: the error that says so is on its way already.
                self._write_metadata(force=True)
            self.folder.close()

    def _can_split(self) -> bool:
        """True when the rollouts of a group need nothing of each other, neither scores nor a shared request."""
        return self.env.has_independent_members and not hasattr(self.client, "for_group")

    def _folder(self, results_path: str | Path | None) -> ResultsFolder:
        if results_path is not None:
            return ResultsFolder(Path(results_path))
        return ResultsFolder(new_results_path(self.env.env_id or type(self.env).__name__, self.model))

    def _resume(self) -> list[Row]:
        """Take over the finished rollouts of the results folder; what remains to be run."""
        if self.folder is None:
            return self.inputs
        if not self.folder.is_there():
            if self.folder.results.exists() and self.folder.results.stat().st_size:
                raise UserError(f"{self.folder.results} has rows and no metadata.json beside it; give another path")
            return self.inputs
        saved_time = check_same(self.folder, self.metadata()).get("time")
        self._time_before = saved_time if isinstance(saved_time, int | float) else 0.0
        is_whole_groups = self.env.requires_group_rollouts and not self.independent_scoring
        return take_over(self.folder, self.inputs, self._count, is_whole_groups=is_whole_groups).missing


def _grouped(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(example_of(row), []).append(row)
    return list(groups.values())


def _first_of(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failures.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


def _as_list(callbacks: Any) -> list[Callable[..., Any]]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]


async def _notify(callback: Callable[..., Any] | None, *args: Any) -> None:
    if callback is not None:
        result = callback(*args)
        if inspect.isawaitable(result):
            await result


def _base_url(client: Any) -> str:
    return str(getattr(client, "base_url", "") or getattr(getattr(client, "transport", None), "base_url", ""))


def _version_info(env: Evaluated) -> dict[str, Any]:
    from mettle import __version__

    version = getattr(env, "env_version", None)
    return {"vf_version": __version__, "vf_commit": None, "env_version": version, "env_commit": None}
