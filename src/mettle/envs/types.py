"""Names for types that environments annotate with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mettle.envs.evaluation.generate import GenerateOutputs
from mettle.envs.rubrics.rubric import RewardFunc
from mettle.envs.state import State, TrajectoryStep
from mettle.envs.timing import RolloutTiming, TimeSpan, TimeSpans
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

DatasetBuilder = Callable[[], Any]
"""A function that makes a dataset; called when the dataset is first asked for."""

Info = dict[str, Any]
RolloutInput = dict[str, Any]
RolloutOutput = dict[str, Any]
SamplingArgs = dict[str, Any]
TrajectoryStepTokens = ResponseTokens

__all__ = [
    "AssistantMessage",
    "DatasetBuilder",
    "GenerateOutputs",
    "Info",
    "Message",
    "Messages",
    "Response",
    "ResponseMessage",
    "ResponseTokens",
    "RewardFunc",
    "RolloutInput",
    "RolloutOutput",
    "RolloutTiming",
    "SamplingArgs",
    "State",
    "SystemMessage",
    "TextMessage",
    "TimeSpan",
    "TimeSpans",
    "Tool",
    "ToolCall",
    "ToolMessage",
    "TrajectoryStep",
    "TrajectoryStepTokens",
    "Usage",
    "UserMessage",
]
