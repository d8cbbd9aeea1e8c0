"""The agent's half of a `ComposableEnv`: how it is installed, where it finds its task, how it is run.

Parts: `Harness`. Invariant: it is data; it knows neither the tasks nor the sandbox.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mettle.envs.composable.tasks import SandboxSpec


@dataclass
class Harness:
    """One agent program.

    `install_script` and `run_command` are shell commands in the sandbox; instruction and system prompt are written to
    their paths before. `sandbox_spec` is for tasks that ask for no sandbox of their own. Folders of this host go where
    `upload_dir_mapping` sends their names (`skills_path` is the place of `skills`). Of the JSON file that the glob
    `metrics_path` finds afterwards (`{workdir}` is the task's), the values under `metrics_key` come into the state,
    those in `metrics_keys` alone, with `metrics_prefix` before their names. Calls of `tool_names` are counted.
    """

    install_script: str | None = None
    install_timeout: int = 300
    run_command: str = ""
    system_prompt: str | None = None
    system_prompt_path: str = "/task/system_prompt.txt"
    instruction_path: str = "/task/instruction.md"
    log_path: str | None = None
    sandbox_spec: SandboxSpec | None = None
    skills_path: str | None = None
    upload_dir_mapping: dict[str, str] | None = None
    get_upload_dirs: Callable[[], Mapping[str, Any] | None] | None = None
    metrics_path: str | None = None
    metrics_prefix: str = ""
    metrics_key: str | None = None
    metrics_keys: list[str] | None = None
    tool_names: list[str] | None = None
    environment_vars: dict[str, str] | None = None

    def get_effective_upload_dir_mapping(self) -> dict[str, str] | None:
        """Where each named folder goes; None when there is no place for any."""
        places = {"skills": self.skills_path} if self.skills_path else {}
        return {**places, **(self.upload_dir_mapping or {})} or None
