"""Every module path that a verifiers release from 0.1.2 to 0.3.0 had, and where its names are here.

Parts: `PACKAGES`, `MODULES`, `homes_of`. A module's names are looked up in the modules listed for it, then among the
names of `mettle.envs`. Invariant: this file is data; nothing is imported by reading it.
"""

from __future__ import annotations

from mettle.envs.legacy.unavailable import ADVICE_BY_PACKAGE

_ENVS = "mettle.envs."
_CLIENTS = "mettle.clients."
_LEGACY = "mettle.envs.legacy."

PACKAGES: dict[str, tuple[str, ...]] = {
    "": (_ENVS + "types",),
    "clients": (_CLIENTS + "base", _CLIENTS + "config", _LEGACY + "clients"),
    "envs": (),
    "envs.experimental": (),
    "envs.experimental.composable": (_ENVS + "composable",),
    "envs.experimental.composable.harnesses": (_ENVS + "composable.opencode",),
    "envs.experimental.harbor_env": ("mettle_harbor.env",),
    "envs.integrations": (),
    "parsers": (),
    "rubrics": (),
    "rubrics.experimental": (),
    "rubrics.utils": (),
    "tools": (),
    "utils": (),
}
"""Packages, without the leading `verifiers`."""

MODULES: dict[str, tuple[str, ...]] = {
    "decorators": (_ENVS + "decorators",),
    "errors": (_ENVS + "errors",),
    "types": (_ENVS + "types",),
    "clients.anthropic_messages_client": (_CLIENTS + "anthropic_messages",),
    "clients.client": (_CLIENTS + "base",),
    "clients.nemorl_chat_completions_client": (_CLIENTS + "tokens",),
    "clients.openai_chat_completions_client": (_CLIENTS + "chat",),
    "clients.openai_chat_completions_token_client": (_CLIENTS + "tokens",),
    "clients.openai_completions_client": (_CLIENTS + "completions",),
    "clients.openai_responses_client": (_CLIENTS + "responses",),
    "clients.renderer_client": (_CLIENTS + "tokens",),
    "envs.cli_agent_env": (_ENVS + "cli_agent_env",),
    "envs.env_group": (_ENVS + "env_group",),
    "envs.environment": (_ENVS + "environment",),
    "envs.multiturn_env": (_ENVS + "multiturn_env",),
    "envs.python_env": (_ENVS + "python_env", _ENVS + "sandboxes"),
    "envs.reasoninggym_env": ("mettle_reasoning_gym.env",),
    "envs.sandbox_env": (_ENVS + "sandbox_env", _ENVS + "sandboxes"),
    "envs.singleturn_env": (_ENVS + "singleturn_env",),
    "envs.stateful_tool_env": (_ENVS + "stateful_tool_env",),
    "envs.textarena_env": ("mettle_textarena.env",),
    "envs.tool_env": (_ENVS + "tool_env",),
    "envs.experimental.cli_agent_env": (_ENVS + "cli_agent_env",),
    "envs.experimental.gym_env": ("mettle_gym.env",),
    "envs.experimental.composable.composable_env": (_ENVS + "composable.env",),
    "envs.experimental.composable.harness": (_ENVS + "composable.harness",),
    "envs.experimental.composable.harnesses.opencode": (_ENVS + "composable.opencode",),
    "envs.experimental.composable.task": (_ENVS + "composable.tasks",),
    "envs.experimental.opencode_env": (_ENVS + "composable.opencode",),
    "envs.experimental.opencode_qa_env": (_ENVS + "composable.opencode",),
    "envs.experimental.harbor_env.env": ("mettle_harbor.env",),
    "envs.experimental.harbor_env.mcp": ("mettle_harbor.env",),
    "envs.experimental.mcp_env": ("mettle_mcp.env",),
    "envs.experimental.rlm_env": (_ENVS + "rlm.env",),
    "envs.rlm_env": (_ENVS + "rlm.env",),
    "envs.experimental.sandbox_mixin": (_ENVS + "sandbox_mixin", _ENVS + "sandboxes"),
    "envs.integrations.openenv_env": ("mettle_openenv.env",),
    "envs.integrations.reasoninggym_env": ("mettle_reasoning_gym.env",),
    "envs.integrations.textarena_env": ("mettle_textarena.env",),
    "parsers.maybe_think_parser": (_ENVS + "parsers.think_parser",),
    "parsers.parser": (_ENVS + "parsers.parser",),
    "parsers.think_parser": (_ENVS + "parsers.think_parser",),
    "parsers.xml_parser": (_ENVS + "parsers.xml_parser",),
    "rubrics.experimental.hybrid_math_rubric": (_ENVS + "rubrics.hybrid_math_rubric",),
    "rubrics.judge_rubric": (_ENVS + "rubrics.judge_rubric",),
    "rubrics.math_rubric": (_ENVS + "rubrics.math_rubric",),
    "rubrics.rubric": (_ENVS + "rubrics.rubric",),
    "rubrics.rubric_group": (_ENVS + "rubrics.rubric_group",),
    "rubrics.tool_rubric": (_ENVS + "rubrics.tool_rubric",),
    "utils.async_utils": (_LEGACY + "asynchrony",),
    "utils.client_utils": (_LEGACY + "clients",),
    "utils.config_utils": (_ENVS + "keys",),
    "utils.data_utils": (_ENVS + "parsers.answers", _ENVS + "datasets"),
    "utils.decorators": (_ENVS + "decorators",),
    "utils.env_utils": (_ENVS + "packages.loading",),
    "utils.error_utils": (_ENVS + "errors",),
    "utils.eval_utils": (_LEGACY + "results", _LEGACY + "logs"),
    "utils.import_utils": (_LEGACY + "results",),
    "utils.logging_utils": (_LEGACY + "logs",),
    "utils.message_utils": (_LEGACY + "messages",),
    "utils.metric_utils": (_LEGACY + "results",),
    "utils.response_utils": (_LEGACY + "responses",),
    "utils.save_utils": (_LEGACY + "results",),
    "utils.thread_utils": (_LEGACY + "asynchrony",),
    "utils.threaded_sandbox_client": (_ENVS + "sandboxes.client",),
    "utils.token_utils": (_LEGACY + "responses",),
    "utils.tools": (_LEGACY + "tools",),
    "utils.tool_utils": (_ENVS + "tool_schema",),
}
"""Modules, without the leading `verifiers`."""


def homes_of(path: str) -> tuple[str, ...] | None:
    """Where the names of `verifiers.<path>` are; None when no release had such a module."""
    if path in PACKAGES:
        return PACKAGES[path]
    return MODULES.get(path)


def is_package(path: str) -> bool:
    """Whether modules lie below `verifiers.<path>`."""
    return path in PACKAGES or advice_for(path) is not None


def advice_for(path: str) -> str | None:
    """What to use instead of anything in `verifiers.<path>`, where nothing of it is offered."""
    while path:
        if path in ADVICE_BY_PACKAGE:
            return ADVICE_BY_PACKAGE[path]
        path = path.rpartition(".")[0]
    return None
