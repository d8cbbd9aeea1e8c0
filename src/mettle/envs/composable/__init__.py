"""An agent program and a set of tasks, put together: `ComposableEnv`.

Parts: `tasks` (what is to be solved: `TaskSet`, `SandboxTaskSet`, `Task`, `SandboxSpec`), `harness` (how an agent is
installed, told its task and run), `env` (`ComposableEnv`), `opencode` (the harness of one agent, and environments made
with it). Invariant: neither tasks nor harness know of each other.
"""

from mettle.envs.composable.env import ComposableEnv
from mettle.envs.composable.harness import Harness
from mettle.envs.composable.tasks import SandboxSpec, SandboxTaskSet, Task, TaskSet

__all__ = ["ComposableEnv", "Harness", "SandboxSpec", "SandboxTaskSet", "Task", "TaskSet"]
