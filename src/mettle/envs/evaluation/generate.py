"""Running an environment over many rows: groups side by side, results saved as they finish, resumed where it stopped.

Parts: `Evaluated` (what is run), `Evaluation`, `GenerateOutputs`. A group is the rows of one `example_id`. Invariants:
a finished rollout is on disk before the next callback sees it, and a resumed evaluation runs only what is missing or
failed; one rollout's failure never ends the evaluation, a full disk does.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mettle.clients.factory import client_from
from mettle.envs.evaluation.refusals import Refusals
from mettle.envs.evaluation.results import ResultsFolder, output_of
from mettle.envs.evaluation.summary import Summary
from mettle.envs.state import State
from mettle.errors import UserError
from mettle.records.messages import Tool

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
METADATA_INTERVAL_S = 0.5


class Evaluated(Protocol):
    """What is asked of an environment that is evaluated; see `mettle.envs.environment.Environment`."""

    env_id: str
    env_args: dict[str, Any]
    sampling_args: dict[str, Any]
    pass_threshold: float
    tool_defs: list[Tool]

    @property
    def requires_group_rollouts(self) -> bool: ...
    async def run_rollout(
        self,
        input: Row,
        client: Any,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        max_retries: int = 0,
    ) -> State: ...
    async def run_group(
        self,
        group_inputs: Sequence[Row],
        client: Any,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        max_retries: int = 0,
    ) -> list[State]: ...


class GenerateOutputs(dict[str, Any]):
    """`outputs` (one row per rollout) and `metadata`. Columns read as attributes: `results.reward`."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name.startswith("__"):
            raise AttributeError(name)
        outputs = self.get("outputs") or []
        if outputs and any(name in output for output in outputs):
            return [output.get(name) for output in outputs]
        raise AttributeError(f"results have no column {name!r}")


class Evaluation:
    """One call of `generate`. `max_concurrent` bounds groups, or rollouts with `independent_scoring`; -1: no bound."""

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
        on_start: Callable[..., Any] | None = None,
        on_progress: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        on_log: Callable[[str], Any] | None = None,
        **_: Any,
    ) -> None:
        self.env = env
        self.inputs: list[Row] = _as_rows(inputs)
        self.client = client_from(client)
        self.model = model
        self.sampling_args = {**env.sampling_args, **(sampling_args or {})}
        self.max_concurrent = max_concurrent
        self.state_columns = list(state_columns or ())
        self.independent_scoring = independent_scoring
        self.max_retries = max_retries
        self.rollouts_per_example = rollouts_per_example or _largest_group(self.inputs)
        self.shuffle, self.shuffle_seed = shuffle, shuffle_seed
        self.on_start = on_start
        self.on_progress = _as_list(on_progress)
        self.on_log = on_log
        self.outputs: list[dict[str, Any]] = []
        self.summary = Summary(self.rollouts_per_example, env.pass_threshold)
        self.folder = self._folder(results_path) if save_results or results_path else None
        self._started = time.time()
        self._metadata_written = 0.0
        self._refusals = Refusals()

    async def run(self) -> GenerateOutputs:
        """Run everything that is missing; all outputs, old and new, with the metadata."""
        remaining = self._resume()
        await _notify(self.on_start, self.inputs, remaining)
        groups = [[row] for row in remaining] if self.independent_scoring else _grouped(remaining)
        num_workers = min(len(groups), self.max_concurrent) if self.max_concurrent > 0 else len(groups)
        pending = iter(groups)
        self._write_metadata(force=True)
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(num_workers):
                    workers.create_task(self._work(pending))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        self._write_metadata(force=True)
        return GenerateOutputs(outputs=self.outputs, metadata=self.metadata())

    def metadata(self) -> dict[str, Any]:
        """What was run and what came of it."""
        return {
            "env_id": self.env.env_id,
            "env_args": self.env.env_args,
            "model": self.model,
            "base_url": _base_url(self.client),
            "num_examples": len({_example(row) for row in self.inputs}),
            "rollouts_per_example": self.rollouts_per_example,
            "shuffle": self.shuffle,
            "shuffle_seed": self.shuffle_seed,
            "sampling_args": self.sampling_args,
            "time": time.time() - self._started,
            **self.summary.metadata(),
            "version_info": _version_info(self.env),
            "state_columns": self.state_columns,
            "tools": [dict(tool) for tool in self.env.tool_defs] or None,
        }

    async def _work(self, pending: Any) -> None:
        for rows in pending:
            if self.independent_scoring:
                states = [await self._rollout(rows[0])]
            else:
                states = await self.env.run_group(
                    rows, self.client, self.model, self.sampling_args, max_retries=self.max_retries
                )
            await self._keep([output_of(state, self.state_columns) for state in states])

    async def _rollout(self, row: Row) -> Any:
        return await self.env.run_rollout(
            row, self.client, self.model, self.sampling_args, max_retries=self.max_retries
        )

    async def _keep(self, outputs: list[dict[str, Any]]) -> None:
        self.outputs.extend(outputs)
        for output in outputs:
            self.summary.add(output)
        if self.folder is not None:
            self.folder.append(outputs)
        self._write_metadata()
        if self.on_log is not None:
            await _notify(self.on_log, f"{len(self.outputs)} of {len(self.inputs)} rollouts")
        if self.on_progress:
            metadata = self.metadata()
            for callback in self.on_progress:
                await _notify(callback, self.outputs, outputs, metadata)
        self._refusals.see(outputs)

    def _write_metadata(self, force: bool = False) -> None:
        if self.folder is None or not (force or time.monotonic() - self._metadata_written > METADATA_INTERVAL_S):
            return
        self.folder.write_metadata(self.metadata())
        self._metadata_written = time.monotonic()

    def _folder(self, results_path: str | Path | None) -> ResultsFolder:
        if results_path is not None:
            return ResultsFolder(Path(results_path))
        module = (self.env.env_id or type(self.env).__name__).rpartition("/")[2].partition("@")[0].replace("-", "_")
        home = Path("environments") / module
        base = (home if home.is_dir() else Path()) / "outputs" / "evals"
        name = f"{self.env.env_id.replace('/', '--') or module}--{self.model.replace('/', '--')}"
        return ResultsFolder(base / name / os.urandom(4).hex())

    def _resume(self) -> list[Row]:
        """Take over the finished rollouts of the results folder; what remains to be run."""
        if self.folder is None or not self.folder.is_there():
            return self.inputs
        self._check_same(self.folder.read_metadata())
        rows = self.folder.read_rows()
        finished = [row for row in rows if row.get("error") is None and row.get("reward") is not None]
        wanted = _count_by_example(self.inputs)
        if self.env.requires_group_rollouts and not self.independent_scoring:
            done = _count_by_example(finished)
            finished = [row for row in finished if done[_example(row)] >= wanted.get(_example(row), 0)]
        kept = []
        for row in finished:
            if wanted.get(_example(row), 0) > 0:
                wanted[_example(row)] -= 1
                kept.append(row)
        self.folder.replace_rows(kept)
        self.outputs.extend(kept)
        for row in kept:
            self.summary.add(row)
        logger.info("resumed evaluation", extra={"kept": len(kept), "of": len(self.inputs)})
        return _take_wanted(self.inputs, wanted)

    def _check_same(self, saved: Mapping[str, Any]) -> None:
        mine = self.metadata()
        assert self.folder is not None, "only a saved evaluation is resumed"
        for name in ("env_id", "model", "rollouts_per_example", "shuffle", "shuffle_seed"):
            if name in saved and saved[name] != mine[name]:
                raise UserError(
                    f"cannot resume from {self.folder.path}: its {name} is {saved[name]!r}, this evaluation's is "
                    f"{mine[name]!r}; give the same, or another results path"
                )


def _as_rows(inputs: Any) -> list[Row]:
    return list(inputs.to_list() if hasattr(inputs, "to_list") else inputs)


def _example(row: Row) -> Any:
    return row.get("example_id", 0)


def _grouped(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(_example(row), []).append(row)
    return list(groups.values())


def _count_by_example(rows: Sequence[Row]) -> dict[Any, int]:
    counts: dict[Any, int] = {}
    for row in rows:
        counts[_example(row)] = counts.get(_example(row), 0) + 1
    return counts


def _largest_group(rows: Sequence[Row]) -> int:
    return max(_count_by_example(rows).values(), default=1)


def _take_wanted(rows: Sequence[Row], wanted: dict[Any, int]) -> list[Row]:
    taken = []
    for row in rows:
        if wanted.get(_example(row), 0) > 0:
            wanted[_example(row)] -= 1
            taken.append(row)
    return taken


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
