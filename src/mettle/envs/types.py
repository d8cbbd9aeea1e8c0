"""Names for types that environments annotate with, and the records that they make by hand.

Parts: what the library works with, under verifiers' names; literals, typed dicts and callables for annotations;
records for scores, endpoints and evaluations. Names of the openai package that the oldest releases offered here are
imported when they are asked for. Invariant: importing this module imports neither openai nor pydantic.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, NotRequired, TypedDict

from mettle.clients.base import Client
from mettle.clients.config import ClientConfig
from mettle.envs.content import (
    ContentPart,
    GenericContentPart,
    ImageUrlContentPart,
    ImageUrlSource,
    InputAudioContentPart,
    InputAudioSource,
    MessageContent,
    TextContentPart,
)
from mettle.envs.errors import Error
from mettle.envs.evaluation.generate import GenerateOutputs
from mettle.envs.rubrics.rubric import RewardFunc
from mettle.envs.state import State, TrajectoryStep
from mettle.envs.timing import RolloutTiming, TimeSpan, TimeSpans
from mettle.records.messages import (
    AssistantMessage,
    Message,
    Messages,
    Record,
    Response,
    ResponseMessage,
    ResponseTokens,
    SystemMessage,
    TextMessage,
    Tool,
    ToolCall,
    ToolMessage,
    Usage,
    UserMessage,
)

DatasetBuilder = Callable[[], Any]
"""A function that makes a dataset; called when the dataset is first asked for."""

ClientType = Literal[
    "openai_completions",
    "openai_chat_completions",
    "openai_chat_completions_token",
    "openai_responses",
    "anthropic_messages",
    "renderer",
    "nemorl_chat_completions",
]
EndpointApi = Literal[
    "chat",
    "chat_completions",
    "completions",
    "responses",
    "messages",
    "openai_chat_completions",
    "openai_completions",
    "openai_responses",
    "anthropic_messages",
]
FinishReason = Literal["stop", "length", "tool_calls"] | None
JsonPrimitive = Literal["string", "number", "integer", "boolean", "array", "object"]
MessageType = Literal["chat", "completion"]
TaskSplit = Literal["train", "eval"]

Info = dict[str, Any]
SamplingArgs = dict[str, Any]
IndividualRewardFunc = Callable[..., float | Awaitable[float]]
GroupRewardFunc = Callable[..., list[float] | Awaitable[list[float]]]
StartCallback = Callable[..., Any]
ProgressCallback = Callable[..., Any]
LogCallback = Callable[[str], Any]
ToolLike = str | Tool | Callable[..., object]

CustomBaseModel = Record
ChatMessage = Message
ChatMessages = Messages
ModelResponse = Response | None
AnthropicThinkingBlock = RedactedThinkingBlock = ThinkingBlock = dict[str, Any]
EndpointClient = Any


class TokenUsage(TypedDict):
    """Tokens of one rollout."""

    input_tokens: float
    output_tokens: float
    final_input_tokens: NotRequired[float]
    final_output_tokens: NotRequired[float]


class ModelPricing(TypedDict):
    """US dollars per million tokens."""

    input_usd_per_mtok: float
    output_usd_per_mtok: float


class EvalCost(TypedDict):
    """US dollars."""

    input_usd: float
    output_usd: float
    total_usd: float


class VersionInfo(TypedDict):
    """What made the results."""

    vf_version: str
    vf_commit: str | None
    env_version: str | None
    env_commit: str | None


class BaseRolloutInput(Record):
    """A row that a rollout starts from: `prompt` and `example_id`."""

    __slots__ = ()


class RolloutInput(BaseRolloutInput):
    """A row with what its rewards need: `answer`, `info`, `task`."""

    __slots__ = ()
    FIELDS = frozenset({"answer", "info", "task"})


class RolloutOutput(Record):
    """A finished rollout as it is saved."""

    __slots__ = ()


class ErrorData(Record):
    """A failure as it is saved: `error`, `message`, `error_chain_repr`, `error_chain_str`."""

    __slots__ = ()


class RolloutScore(Record):
    """One rollout's `reward` and `metrics`."""

    __slots__ = ()


class RolloutScores(Record):
    """A group's `reward` (a list) and `metrics` (a list for each name)."""

    __slots__ = ()


class GenerateInputs(Record):
    """Columns to generate from: `prompt`, and `answer`, `info`, `task`, `completion`."""

    __slots__ = ()
    FIELDS = frozenset({"answer", "info", "task", "completion"})


class GenerateMetadata(Record):
    """What was evaluated and what came of it."""

    __slots__ = ()


class ProcessedOutputs(Record):
    """Token arrays of finished rollouts, as trainers of 0.1 took them."""

    __slots__ = ()


class EndpointConfig(Record):
    """A row of an endpoint registry: `model`, `base_url`, `api_key_var`, `api_client_type`, `extra_headers`."""

    __slots__ = ()
    FIELDS = frozenset({"api_client_type", "extra_headers"})


class EvalConfig(Record):
    """One evaluation as it is asked for. What is not given reads as None."""

    __slots__ = ()

    def __missing__(self, name: str) -> Any:
        return None


class EvalRunConfig(EvalConfig):
    """Several evaluations: `evals`."""

    __slots__ = ()


Endpoint = EndpointConfig
Endpoints = dict[str, list[EndpointConfig]]
EndpointClientConfig = ClientConfig
ErrorInfo = ErrorData
TrajectoryStepTokens = ResponseTokens
RoutedExpertsPayload = dict[str, Any]

_OPENAI_CHAT_NAMES = frozenset(
    {
        "ChatCompletion",
        "ChatCompletionAssistantMessageParam",
        "ChatCompletionMessage",
        "ChatCompletionMessageParam",
        "ChatCompletionRole",
        "ChatCompletionSystemMessageParam",
        "ChatCompletionToolMessageParam",
        "ChatCompletionToolParam",
        "ChatCompletionUserMessageParam",
    }
)


def __getattr__(name: str) -> Any:
    if name == "ChatCompletionMessageToolCall":
        return ToolCall
    if name in _OPENAI_CHAT_NAMES:
        import openai.types.chat as chat

        return getattr(chat, name)
    if name in ("AsyncOpenAI", "OpenAI"):
        import openai

        return getattr(openai, name)
    if name in ("Anthropic", "AsyncAnthropic"):
        import anthropic

        return getattr(anthropic, name)
    if name == "Completion":
        from openai.types import Completion

        return Completion
    if name in ("FunctionDefinition", "FunctionParameters"):
        import openai.types.shared_params as shared

        return getattr(shared, name)
    raise AttributeError(f"mettle.envs.types has no {name!r}")


__all__ = [
    "AnthropicThinkingBlock",
    "AssistantMessage",
    "BaseRolloutInput",
    "ChatMessage",
    "ChatMessages",
    "Client",
    "ClientConfig",
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
    "Error",
    "ErrorData",
    "ErrorInfo",
    "EvalConfig",
    "EvalCost",
    "EvalRunConfig",
    "FinishReason",
    "GenerateInputs",
    "GenerateMetadata",
    "GenerateOutputs",
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
    "Message",
    "MessageContent",
    "MessageType",
    "Messages",
    "ModelPricing",
    "ModelResponse",
    "ProcessedOutputs",
    "ProgressCallback",
    "RedactedThinkingBlock",
    "Response",
    "ResponseMessage",
    "ResponseTokens",
    "RewardFunc",
    "RolloutInput",
    "RolloutOutput",
    "RolloutScore",
    "RolloutScores",
    "RolloutTiming",
    "RoutedExpertsPayload",
    "SamplingArgs",
    "StartCallback",
    "State",
    "SystemMessage",
    "TaskSplit",
    "TextContentPart",
    "TextMessage",
    "ThinkingBlock",
    "TimeSpan",
    "TimeSpans",
    "TokenUsage",
    "Tool",
    "ToolCall",
    "ToolLike",
    "ToolMessage",
    "TrajectoryStep",
    "TrajectoryStepTokens",
    "Usage",
    "UserMessage",
    "VersionInfo",
]
