"""Names for types that environments annotate with.

Parts: what the library works with, under verifiers' names; literals and callables for annotations; the records of
`author_records`. Names of the openai package that the oldest releases offered here are
imported when they are asked for. Invariant: importing this module imports neither openai nor pydantic.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from mettle.clients.base import Client
from mettle.clients.config import ClientConfig
from mettle.envs.author_records import (
    BaseRolloutInput,
    EndpointConfig,
    ErrorData,
    EvalConfig,
    EvalCost,
    EvalRunConfig,
    GenerateInputs,
    GenerateMetadata,
    ModelPricing,
    ProcessedOutputs,
    RolloutInput,
    RolloutOutput,
    RolloutScore,
    RolloutScores,
    TokenUsage,
    VersionInfo,
)
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
from mettle.envs.rubrics.rubric import RewardFunc
from mettle.envs.state import State, TrajectoryStep
from mettle.envs.timing import RolloutTiming, TimeSpan, TimeSpans
from mettle.evals.generated import GenerateOutputs
from mettle.records.messages import (
    AssistantMessage,
    Message,
    Messages,
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
from mettle.records.record import Record

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
