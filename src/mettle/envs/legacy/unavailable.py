"""Names of verifiers that can be imported here and not used: what each would need, and what to use instead.

An environment module often imports more than it uses, so a name that is not offered fails when it is used (called,
subclassed and constructed, or asked for an attribute) and not when it is imported. Invariant: the failure is one
`UserError` that names the alternative; nothing pretends to work.
"""

from __future__ import annotations

from abc import ABCMeta
from functools import cache
from typing import Any, NoReturn

from mettle.envs.guests import install_line
from mettle.errors import UserError

_V1 = "the tasks and harnesses of verifiers.v1 are another library; write a SingleTurnEnv, MultiTurnEnv or ToolEnv"
_TRAINER = "training is `mettle rl run`; it takes the environment by its name"
_COMPOSABLE = "run the agent with CliAgentEnv, or HarborEnv for task folders with tests"
_TASKSETS = "it downloaded one benchmark; subclass TaskSet or SandboxTaskSet with the tasks that you have"
_SERVER = "`mettle eval run` and the orchestrator run environments in worker processes by themselves"
_COMMAND = "use the `mettle` command line: `mettle --help`"

ADVICE = {
    "RLM": _V1,
    "BrowserEnv": "use MCPEnv with a browser server",
    "OpenCodeRLMEnv": _COMPOSABLE,
    "RolloutGatewayMixin": "CliAgentEnv gives an agent a proxy endpoint by itself",
    "OpenAIChatCompletionsTokenClient": "use TokenClient, which sends token ids to `/v1/generate`",
    "NeMoRLChatCompletionsClient": "use OpenAIChatCompletionsClient or TokenClient",
    "RendererClient": "use TokenClient, which renders on the client's side",
    "RemoteHybridMathRubric": "use HybridMathRubric, which verifies on this machine",
    **dict.fromkeys(
        (
            "GRPOConfig",
            "GRPOTrainer",
            "RLConfig",
            "RLTrainer",
            "get_model",
            "get_model_and_tokenizer",
            "get_tokenizer",
            "grpo_defaults",
            "lora_defaults",
        ),
        _TRAINER,
    ),
    **dict.fromkeys(
        (
            "CLIHarness",
            "Env",
            "EnvConfig",
            "HarborTaskset",
            "HarborTasksetConfig",
            "Harness",
            "HarnessConfig",
            "MCPTool",
            "MCPToolConfig",
            "MiniSWEAgent",
            "OpenCode",
            "Pi",
            "SandboxConfig",
            "Task",
            "Taskset",
            "TasksetConfig",
            "Toolset",
            "ToolsetConfig",
            "User",
            "UserConfig",
        ),
        _V1,
    ),
}
"""Names of the root package, and what to use instead of each."""

ADAPTERS = {
    "GymEnv": "gym",
    "HarborEnv": "harbor",
    "MCPEnv": "mcp",
    "MCPServerConfig": "mcp",
    "OpenEnvEnv": "openenv",
    "ReasoningGymEnv": "reasoning_gym",
    "TextArenaEnv": "textarena",
}
"""The names of verifiers that adapters of ours offer, and the folder of each; refused where that is not installed."""

ADVICE_BY_PACKAGE = {
    "rl": _TRAINER,
    "trainers": _TRAINER,
    "inference": _TRAINER,
    "gepa": "prompt optimisation is `mettle gepa run`",
    "cli": _COMMAND,
    "scripts": _COMMAND,
    "serve": _SERVER,
    "workers": _SERVER,
    "envs.experimental.composable.tasksets": _TASKSETS,
    "envs.experimental.composable.harnesses.rlm": _COMPOSABLE,
    "envs.experimental.composable.harnesses.mini_swe_agent": _COMPOSABLE,
    "envs.experimental.composable.harnesses.codex": _COMPOSABLE,
    "envs.experimental.opencode_rlm_env": _COMPOSABLE,
    "envs.experimental.rollout_gateway_mixin": ADVICE["RolloutGatewayMixin"],
    "envs.experimental.utils": _COMPOSABLE,
    "envs.integrations.browser_env": ADVICE["BrowserEnv"],
    "utils.tools": "it asked a web service; give the environment a tool of your own",
    **dict.fromkeys(
        (
            "rubrics.utils.math_utils",
            "utils.display_utils",
            "utils.env_config_utils",
            "utils.eval_display",
            "utils.heartbeat",
            "utils.install_utils",
            "utils.interception_utils",
            "utils.model_utils",
            "utils.path_utils",
            "utils.pricing_utils",
            "utils.process_utils",
            "utils.report_utils",
            "utils.rlm_data_serialization_utils",
            "utils.serve_utils",
            "utils.tunnel_utils",
            "utils.usage_utils",
            "utils.version_utils",
            "utils.worker_utils",
        ),
        "it served verifiers' own commands, and nothing that an environment is made of",
    ),
}
"""Packages of which nothing is offered: any name can be imported from them, and none used."""


class _Unusable(ABCMeta):
    """The type of a name that can only be imported. `ABCMeta`, because environments mix such a class with theirs."""

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        _refuse(cls)

    @property
    def __signature__(cls) -> Any:
        """Asked for when the name is given as a tool or a reward function."""
        _refuse(cls)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        _refuse(cls)


def _refuse(used: type) -> NoReturn:
    base = next(kind for kind in used.__mro__ if "_mettle_advice" in vars(kind))
    raise UserError(f"{base.__name__} of verifiers is not offered here: {vars(base)['_mettle_advice']}")


@cache
def unavailable(name: str, advice: str) -> type:
    """A class `name` whose use is refused with `advice`."""
    return _Unusable(name, (), {"_mettle_advice": advice, "__doc__": f"Not offered here: {advice}."})


def unavailable_name(name: str) -> type | None:
    """The refusing class for a name of the root package; None for a name that verifiers never had."""
    advice = ADVICE.get(name)
    if advice is None and name in ADAPTERS:
        advice = f"it is in an adapter, which is not installed: {install_line(ADAPTERS[name])}"
    return unavailable(name, advice) if advice else None
