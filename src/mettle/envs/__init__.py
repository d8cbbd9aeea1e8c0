"""Environments: where a policy acts and what it is rewarded for. The verifiers v0 API, kept alive.

`import mettle.envs as vf` offers the names of verifiers 0.1 to 0.3 with the same arguments and meaning. Parts: here,
the environments (`environment`, `multiturn_env`, `singleturn_env`, `tool_env`, `stateful_tool_env`, `env_group`,
`sandbox_env`, `python_env`, `cli_agent_env`) and what they stand on (`state`, `rows`, `splits`, `errors`, `timing`);
`parsers/`, `rubrics/`, `packages/` (from a name to an environment or an adapter's class), `proxy/` (agents that call a
model themselves), `workers/` (environments in processes of their own), `legacy/` (habits of earlier releases).
Invariants: a name is imported when it is first used, so that listing environments costs nothing; torch, openai,
datasets and pydantic are never imported here.
"""

from __future__ import annotations

import importlib
from typing import Any

from mettle import __version__
from mettle.envs.definitions import Family, adapt_with

_ROOM = "mettle.envs."
_MESSAGES = "mettle.records.messages"
_WHERE: dict[str, tuple[str, ...]] = {
    _ROOM + "environment": ("Environment",),
    _ROOM + "loops": ("run_sync",),
    _ROOM + "multiturn_env": ("MultiTurnEnv", "MultiTurnMonitorRubric"),
    _ROOM + "context": ("ContextPolicy", "ContextWindow"),
    _ROOM + "singleturn_env": ("SingleTurnEnv",),
    _ROOM + "tool_env": ("ToolEnv", "ToolMonitorRubric"),
    _ROOM + "stateful_tool_env": ("StatefulToolEnv",),
    _ROOM + "env_group": ("EnvGroup",),
    _ROOM + "cli_agent_env": ("CliAgentEnv",),
    _ROOM + "sandbox_env": ("SandboxEnv",),
    _ROOM + "python_env": ("PythonEnv",),
    _ROOM + "rlm.env": ("RLMEnv",),
    _ROOM + "composable": ("ComposableEnv",),
    _ROOM + "composable.opencode": ("OpenCodeEnv", "OpenCodeQAEnv"),
    _ROOM + "sandboxes": ("AdvancedConfigs",),
    _ROOM + "sandbox_mixin": ("SandboxMixin",),
    _ROOM + "episodes": ("EpisodicSumRubric",),
    _ROOM + "rubrics.rubric": ("RewardFunc", "Rubric"),
    _ROOM + "rubrics.code_rubric": ("CodeRubric",),
    _ROOM + "rubrics.function": ("run_in",),
    _ROOM + "rubrics.judge_rubric": ("JudgeRubric",),
    _ROOM + "rubrics.math_rubric": ("MathRubric",),
    _ROOM + "rubrics.hybrid_math_rubric": ("HybridMathRubric",),
    _ROOM + "rubrics.tool_rubric": ("ToolRubric",),
    _ROOM + "datasets": ("load_example_dataset",),
    _ROOM + "rubrics.rubric_group": ("RubricGroup",),
    _ROOM + "parsers.parser": ("Parser",),
    _ROOM + "parsers.code_parser": ("CodeParser",),
    _ROOM + "parsers.think_parser": ("MaybeThinkParser", "ThinkParser"),
    _ROOM + "parsers.xml_parser": ("XMLParser",),
    _ROOM + "state": ("State", "TrajectoryStep"),
    _ROOM + "timing": ("RolloutTiming", "TimeSpan", "TimeSpans"),
    _ROOM + "rows": ("Rows",),
    "mettle.evals.generated": ("GenerateOutputs",),
    _ROOM + "decorators": (
        "advantage",
        "cleanup",
        "discover_decorated",
        "metric",
        "reward",
        "setup",
        "stop",
        "teardown",
        "update",
    ),
    _ROOM + "demonstrations": ("Demonstrator",),
    _ROOM + "signatures": ("maybe_await",),
    _ROOM + "tool_schema": ("convert_func_to_oai_tool", "convert_func_to_tool_def"),
    _ROOM + "parsers.answers": (
        "BOXED_SYSTEM_PROMPT",
        "THINK_BOXED_SYSTEM_PROMPT",
        "extract_boxed_answer",
        "extract_hash_answer",
    ),
    _ROOM + "packages.loading": ("load_environment",),
    _ROOM + "types": (
        "AnthropicThinkingBlock",
        "BaseRolloutInput",
        "ChatMessage",
        "ChatMessages",
        "ClientType",
        "ContentPart",
        "CustomBaseModel",
        "DatasetBuilder",
        "Endpoint",
        "EndpointApi",
        "EndpointClient",
        "EndpointClientConfig",
        "EndpointConfig",
        "Endpoints",
        "ErrorData",
        "ErrorInfo",
        "EvalConfig",
        "EvalCost",
        "EvalRunConfig",
        "FinishReason",
        "GenerateInputs",
        "GenerateMetadata",
        "GenericContentPart",
        "GroupRewardFunc",
        "ImageUrlContentPart",
        "ImageUrlSource",
        "IndividualRewardFunc",
        "Info",
        "InputAudioContentPart",
        "InputAudioSource",
        "JsonPrimitive",
        "LogCallback",
        "MessageContent",
        "MessageType",
        "Messages",
        "ModelPricing",
        "ModelResponse",
        "ProcessedOutputs",
        "ProgressCallback",
        "RedactedThinkingBlock",
        "RolloutInput",
        "RolloutOutput",
        "RolloutScore",
        "RolloutScores",
        "RoutedExpertsPayload",
        "SamplingArgs",
        "StartCallback",
        "TaskSplit",
        "TextContentPart",
        "ThinkingBlock",
        "TokenUsage",
        "ToolLike",
        "TrajectoryStepTokens",
        "VersionInfo",
    ),
    _ROOM + "keys": ("MissingKeyError", "ensure_keys"),
    _ROOM + "errors": (
        "BrowserSandboxError",
        "EmptyModelResponseError",
        "Error",
        "ErrorChain",
        "InfraError",
        "InvalidModelResponseError",
        "JudgeError",
        "ModelError",
        "OverlongPromptError",
        "SandboxError",
        "ToolCallError",
        "ToolError",
        "ToolParseError",
        "TunnelError",
        "error_data",
        "get_error_chain",
    ),
    _ROOM + "legacy.clients": ("OpenAIClient", "load_prime_config", "setup_anthropic_client", "setup_openai_client"),
    _ROOM + "legacy.results": ("load_endpoints",),
    _ROOM + "legacy.logs": ("log_level", "print_prompt_completions_sample", "quiet_verifiers", "setup_logging"),
    _ROOM + "legacy.responses": ("parse_response_message", "parse_response_messages", "parse_response_tokens"),
    _MESSAGES: (
        "AssistantMessage",
        "Message",
        "Response",
        "ResponseMessage",
        "ResponseTokens",
        "SystemMessage",
        "TextMessage",
        "Tool",
        "ToolCall",
        "ToolMessage",
        "Usage",
        "UserMessage",
    ),
    "mettle.clients.base": ("Client",),
    "mettle.clients.config": ("ClientConfig",),
    "mettle.clients.endpoint_clients": (
        "AnthropicMessagesClient",
        "OpenAIChatCompletionsClient",
        "OpenAICompletionsClient",
        "OpenAIResponsesClient",
    ),
    "mettle.clients.tokens": ("TokenClient",),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}
_ADAPTERS = ("GymEnv", "HarborEnv", "MCPEnv", "MCPServerConfig", "OpenEnvEnv", "ReasoningGymEnv", "TextArenaEnv")

__all__ = ["__version__", *sorted((*_MODULE_OF, *_ADAPTERS))]


def _adapt(kind: type, family: Family) -> None:
    """What is written for an older release becomes callable; the layer is read when the first class is defined."""
    importlib.import_module(_ROOM + "legacy.adaptation").adapt(kind, family)


adapt_with(_adapt)


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is not None:
        value = getattr(importlib.import_module(module), name)
    elif name.startswith("_") or (value := _from_elsewhere(name)) is None:
        raise AttributeError(f"mettle.envs has no {name!r}")
    globals()[name] = value
    return value


def _from_elsewhere(name: str) -> Any:
    """A class of an adapter package, or one that says what to take instead; None for a name that nobody knows."""
    offered = importlib.import_module(_ROOM + "packages.adapters").adapter_class(name)
    return offered or importlib.import_module(_ROOM + "legacy.unavailable").unavailable_name(name)


def __dir__() -> list[str]:
    return __all__
