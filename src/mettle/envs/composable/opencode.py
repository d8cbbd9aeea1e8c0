"""OpenCode as an agent: its harness, and the environments that verifiers made with it.

Parts: `opencode_harness`, `OpenCodeEnv`, `OpenCodeQAEnv`. OpenCode is not part of Mettle and cannot be downloaded from
inside a sandbox: the program `opencode` has to be installed on this host, or in the image of a container backend.
Invariant: where it is not there, the rollout's error says so, and nothing is scored.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mettle.envs.composable.env import ComposableEnv
from mettle.envs.composable.harness import Harness
from mettle.envs.composable.tasks import SandboxSpec, TaskSet
from mettle.envs.rubrics.rubric import Rubric

INSTALLED = (
    "command -v opencode > /dev/null || { echo 'opencode is not installed on this host, and a sandbox cannot download"
    " it; install it here, or give an install_command that works without a network' >&2; exit 1; }"
)
NO_GIT = (
    'mkdir -p /tmp/no-git; printf "#!/bin/sh\\nexit 1\\n" > /tmp/no-git/git; chmod +x /tmp/no-git/git;'
    " export PATH=/tmp/no-git:$PATH; "
)
CONFIG_PATH = "/task/opencode.json"
PROVIDER = "mettle"


def opencode_harness(
    system_prompt: str | None = None,
    task_system_prompt: str | None = None,
    disabled_tools: Sequence[str] | None = None,
    agent_workdir: str = "/app",
    allow_git: bool = True,
    disable_compaction: bool = True,
    provider_timeout_ms: int = 3_600_000,
    install_command: str | None = None,
    instruction_path: str = "/task/instruction.md",
    system_prompt_path: str = "/task/system_prompt.txt",
    log_path: str = "/task/opencode.log",
    sandbox_spec: SandboxSpec | None = None,
    **_: Any,
) -> Harness:
    """OpenCode, run once on the instruction. Arguments about releases to download have no meaning here."""
    told = "\n\n".join(text for text in (system_prompt, task_system_prompt) if text) or None
    prompt_path = system_prompt_path if told else None
    config = _config(prompt_path, disabled_tools or (), disable_compaction, provider_timeout_ms)
    denied = "" if allow_git else NO_GIT
    run = (
        f"{denied}cd {shlex.quote(agent_workdir)}; export OPENCODE_CONFIG={CONFIG_PATH} HOME=/tmp;"
        f' opencode run --model "{PROVIDER}/$OPENAI_MODEL" "$(cat {instruction_path})" > {log_path} 2>&1'
    )
    script = f"{install_command or INSTALLED}; printf %s {shlex.quote(config)} > {CONFIG_PATH}"
    return Harness(
        install_script=f"set -e; {script}",
        run_command=f"sh -c {shlex.quote(run)}",
        system_prompt=told,
        system_prompt_path=system_prompt_path,
        instruction_path=instruction_path,
        log_path=log_path,
        sandbox_spec=sandbox_spec,
    )


def _config(prompt_path: str | None, disabled: Sequence[str], disable_compaction: bool, timeout_ms: int) -> str:
    options = {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}", "timeout": timeout_ms}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": PROVIDER, "options": options}
    agent: dict[str, Any] = {"tools": dict.fromkeys(disabled, False)}
    if prompt_path:
        agent["prompt"] = f"{{file:{prompt_path}}}"
    return json.dumps({
        "provider": {PROVIDER: {**provider, "models": {"{env:OPENAI_MODEL}": {}}}},
        "agent": {"build": agent},
        "compaction": {"auto": not disable_compaction},
        "autoupdate": False,
        "share": "disabled",
    })  # fmt: skip


class _Rows(TaskSet):
    """Rows that an author gave to `OpenCodeEnv`, under its folder."""

    def __init__(self, dataset: Any, workdir: str) -> None:
        super().__init__(dataset, "opencode")
        self.default_workdir = workdir


class OpenCodeEnv(ComposableEnv):
    """OpenCode on the rows of a dataset; the last user message is its instruction."""

    DEFAULT_AGENT_WORKDIR = "/app"
    DEFAULT_SYSTEM_PROMPT: str | None = None
    """None is OpenCode's own."""
    DEFAULT_DISABLED_TOOLS: ClassVar[list[str]] = ["question", "task", "webfetch"]
    DEFAULT_DISABLE_COMPACTION = True
    DEFAULT_INCLUDE_TASK_SYSTEM_PROMPT = True

    def __init__(
        self,
        dataset: Any,
        rubric: Rubric | None = None,
        agent_workdir: str = DEFAULT_AGENT_WORKDIR,
        system_prompt: str | None = DEFAULT_SYSTEM_PROMPT,
        disabled_tools: Sequence[str] | None = tuple(DEFAULT_DISABLED_TOOLS),
        disable_compaction: bool = DEFAULT_DISABLE_COMPACTION,
        install_command: str | None = None,
        task_system_prompt: str | None = None,
        include_task_system_prompt: bool = DEFAULT_INCLUDE_TASK_SYSTEM_PROMPT,
        **kwargs: Any,
    ) -> None:
        harness = opencode_harness(
            system_prompt=system_prompt,
            task_system_prompt=task_system_prompt if include_task_system_prompt else None,
            disabled_tools=disabled_tools,
            agent_workdir=agent_workdir,
            disable_compaction=disable_compaction,
            install_command=install_command,
        )
        super().__init__(_Rows(dataset, agent_workdir), harness, rubric=rubric or Rubric(), **kwargs)


class OpenCodeQAEnv(OpenCodeEnv):
    """OpenCode on questions of a Hugging Face dataset."""

    DEFAULT_QUESTION_KEY, DEFAULT_ANSWER_KEY = "question", "answer"
    DEFAULT_INSTRUCTION_PROMPT = DEFAULT_INSTRUCTION_PROMPT_POST = ""
    DEFAULT_DIFFICULTY_KEY: str | None = None
    DEFAULT_MIN_AVG_REWARD, DEFAULT_MAX_AVG_REWARD = 0.0, 1.0

    def __init__(
        self,
        rubric: Rubric,
        dataset_name: str,
        dataset_subset: str | None = None,
        dataset_split: str = "train",
        question_key: str = "question",
        answer_key: str = "answer",
        instruction_prompt: str = "",
        instruction_prompt_post: str = "",
        difficulty_key: str | None = None,
        min_avg_reward: float = 0.0,
        max_avg_reward: float = 1.0,
        **kwargs: Any,
    ) -> None:
        from datasets import load_dataset

        def is_wanted(row: Mapping[str, Any]) -> bool:
            return difficulty_key is None or min_avg_reward <= float(row[difficulty_key]) <= max_avg_reward

        rows = [
            {
                "question": f"{instruction_prompt}{row[question_key]}{instruction_prompt_post}",
                "answer": str(row[answer_key]),
            }
            for row in load_dataset(dataset_name, dataset_subset, split=dataset_split)
            if is_wanted(row)
        ]
        super().__init__(rows, rubric, **kwargs)


__all__ = ["OpenCodeEnv", "OpenCodeQAEnv", "opencode_harness"]
