"""The task's half of a `ComposableEnv`: what is to be solved, in what sandbox, and how it is scored.

Parts: `SandboxSpec`, `TaskSet`, `SandboxTaskSet`, `ComposedTask` (in verifiers `Task`). Authors override the hooks.
Invariant: a task set that was filtered or cut is another one over fewer rows; the first keeps its own.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from mettle.envs.rows import Rows
from mettle.envs.rubrics.rubric import Rubric
from mettle.records.messages import Messages, UserMessage, messages_from

WORKDIR = "/app"


@dataclass
class SandboxSpec:
    """What sandbox one task wants."""

    image: str = "python:3.11-slim"
    cpu_cores: int = 4
    memory_gb: int = 4
    disk_size_gb: int = 10
    gpu_count: int = 0
    gpu_type: str | None = None
    timeout_minutes: int = 60


class TaskSet:
    """Tasks over the rows of a dataset, each with its `info`."""

    default_workdir = WORKDIR

    def __init__(self, dataset: Any, name: str = "", filter_fn: Any = None) -> None:
        self.name = name or type(self).__name__
        self._rows = dataset if callable(dataset) else Rows(dataset)
        if filter_fn is not None:
            self._rows = self._kept(filter_fn)

    # What authors say of a task

    def get_instruction(self, info: Mapping[str, Any]) -> str:
        """What the agent is told to do."""
        return str(info.get("question") or info.get("instruction") or info.get("problem_statement") or "")

    def get_rubric(self) -> Rubric:
        """How a rollout is scored."""
        return Rubric()

    def get_sandbox_spec(self, info: Mapping[str, Any]) -> SandboxSpec | None:
        """The sandbox that a task wants; None leaves it to the harness."""
        return None

    def get_workdir(self, info: Mapping[str, Any]) -> str:
        """Where the agent works; AGENT_WORKDIR inside."""
        return self.default_workdir

    def get_env_vars(self) -> dict[str, str]:
        """Environment variables inside."""
        return {}

    def get_upload_dirs(self) -> Mapping[str, Any] | None:
        """Folders of this host, by the names that the harness has a place for."""
        return None

    async def setup(self, state: Any) -> None:
        """Prepare the sandbox (`state["sandbox_client"]`, `state["sandbox_id"]`) before the agent is there."""

    async def evaluate(self, state: Any) -> None:
        """Look at the sandbox when the agent has ended, and leave in `state` what the rubric wants."""

    async def validate_instance(self, state: Any) -> bool:
        """Whether the task can be solved, by its own solution."""
        return True

    async def cleanup(self, state: Any) -> None:
        """Let go of what `setup` made elsewhere."""

    # The rows

    def get_dataset(self) -> Rows:
        """The rows, each with a prompt."""
        return Rows.from_list([self._prompted(dict(row)) for row in self._all()])

    def filter(self, predicate: Callable[[Mapping[str, Any]], bool]) -> Self:
        """The same over the rows that `predicate` holds for."""
        return self._over(self._kept(predicate))

    def take(self, n: int) -> Self:
        """The same over the first `n` rows."""
        return self._over(Rows.from_list(self._all()[:n]))

    def __len__(self) -> int:
        return len(self._all())

    def __getitem__(self, index: int) -> ComposedTask:
        return ComposedTask(self, self._prompted(dict(self._all()[index])))

    def __iter__(self) -> Iterator[ComposedTask]:
        return (self[index] for index in range(len(self)))

    async def validate(self, n: int | None = None, concurrency: int = 10) -> list[dict[str, Any]]:
        """Ask `validate_instance` of the first `n` tasks; for each its index and whether it is valid."""
        places = asyncio.Semaphore(concurrency)

        async def ask(index: int) -> dict[str, Any]:
            async with places:
                task = self[index]
                state = {"info": task.info, "answer": task.answer}
                return {"index": index, "valid": bool(await self.validate_instance(state))}

        return list(await asyncio.gather(*(ask(index) for index in range(len(self) if n is None else n))))

    def _all(self) -> list[Mapping[str, Any]]:
        if callable(self._rows):
            self._rows = Rows(self._rows())
        return list(self._rows.to_list())

    def _kept(self, predicate: Callable[[Mapping[str, Any]], bool]) -> Rows:
        return Rows.from_list([row for row in self._all() if predicate(row)])

    def _over(self, rows: Rows) -> Self:
        made = copy.copy(self)
        made._rows = rows
        return made

    def _prompted(self, row: dict[str, Any]) -> dict[str, Any]:
        if row.get("prompt") is None and row.get("question") is None:
            row["prompt"] = [UserMessage(content=self.get_instruction(row.get("info") or {}))]
        return row


class SandboxTaskSet(TaskSet):
    """Tasks that need a sandbox; `get_sandbox_spec` says which."""

    def get_sandbox_spec(self, info: Mapping[str, Any]) -> SandboxSpec | None:
        """The default sandbox."""
        return SandboxSpec()


@dataclass(frozen=True)
class ComposedTask:
    """One task of a set."""

    taskset: TaskSet
    row: Mapping[str, Any]

    @property
    def info(self) -> dict[str, Any]:
        """What its row says of it."""
        return dict(self.row.get("info") or {})

    @property
    def answer(self) -> Any:
        """Its reference answer."""
        return self.row.get("answer", "")

    @property
    def prompt(self) -> Messages:
        """What the agent is asked."""
        asked = self.row.get("prompt")
        return messages_from(asked) if asked is not None else [UserMessage(content=str(self.row["question"]))]

    @property
    def sandbox_spec(self) -> SandboxSpec | None:
        """Its sandbox."""
        return self.taskset.get_sandbox_spec(self.info)


Task = ComposedTask
