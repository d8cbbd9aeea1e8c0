"""States of an environment to rollout records.

The tokens of each model call are kept as what they add to the call before (`Turn`). Ids inside a completion that the
policy did not sample (a mask says so) become the prompt of a further turn. A rollout without tokens (an endpoint that
does not tell them) has no turns and cannot train, but can be evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mettle.errors import EnvironmentFault, RolloutError
from mettle.orchestrator.config import SamplingConfig
from mettle.orchestrator.source import GroupRequest
from mettle.records.messages import ResponseTokens
from mettle.records.sampling import SamplingParams
from mettle.records.tasks import RolloutRecord, Turn

MAX_ERROR_LENGTH = 2000


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """The sampling of requests from its configuration."""
    return SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        seed=config.seed,
    )


def failed_rollouts(request: GroupRequest, error: BaseException) -> tuple[RolloutRecord, ...]:
    """The records of a group that came to nothing. What is not attributed yet is the environment's fault."""
    kind = error.kind if isinstance(error, RolloutError) else EnvironmentFault.kind
    text = str(error) if isinstance(error, RolloutError) else f"{type(error).__name__}: {error}"
    return tuple(
        RolloutRecord(f"{request.prefix}-{i}", None, {}, [], (), error_kind=kind, error=text[:MAX_ERROR_LENGTH])
        for i in range(request.size)
    )


def rollout_record(
    state: Mapping[str, Any], rollout_id: str, temperature: float, *, has_advantages: bool = False
) -> RolloutRecord:
    """One finished state as a record; with `has_advantages` the environment's own advantages are kept."""
    error = state.get("error")
    kind, text = error_of(error)
    reward = state.get("reward")
    return RolloutRecord(
        rollout_id=rollout_id,
        reward=None if kind is not None or reward is None else float(reward),
        metrics={name: float(value) for name, value in (state.get("metrics") or {}).items() if value is not None},
        messages=conversation(state),
        turns=turns_of(state.get("trajectory") or (), temperature, reward, has_advantages=has_advantages),
        stop_condition=state.get("stop_condition"),
        is_truncated=bool(state.get("is_truncated")),
        duration_s=duration_of(state),
        error_kind=kind if kind is not None or reward is not None else EnvironmentFault.kind,
        error=text if kind is not None or reward is not None else "the rollout ended without a reward and an error",
        advantage=state.get("advantage") if has_advantages else None,
        answer=str(state.get("answer") or ""),
    )


def error_of(error: Any) -> tuple[str | None, str | None]:
    """(kind, message) of what a state calls its error."""
    if error is None:
        return None, None
    kind = getattr(error, "kind", None)
    text = str(error) if kind else f"{type(error).__name__}: {error}"
    return kind or EnvironmentFault.kind, text[:MAX_ERROR_LENGTH]


def conversation(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The whole conversation as plain dicts, prompt first."""
    prompt = state.get("prompt") or []
    messages: list[dict[str, Any]] = []
    for part in (prompt, state.get("completion") or []):
        if isinstance(part, str):
            messages.append({"role": "text", "content": part})
        else:
            messages += [_plain(message) for message in part]
    return messages


def turns_of(
    trajectory: Sequence[Mapping[str, Any]],
    temperature: float,
    reward: float | None = None,
    *,
    has_advantages: bool = False,
) -> tuple[Turn, ...]:
    """The model calls of a trajectory, each as what it adds to the one before.

    Steps keep their rewards unless all are that of the rollout, `reward`: scoring gives it to steps without one.
    """
    turns: list[Turn] = []
    has_rewards = any(step.get("reward") not in (None, reward) for step in trajectory)
    previous: ResponseTokens | None = None
    whole: NDArray[np.int32] | None = None
    # `whole` is what the previous call ended with, kept only when its own tokens don't say so themselves.
    for step in trajectory:
        tokens = step.get("tokens")
        if tokens is None or not len(tokens["completion_ids"]):
            continue
        completion = np.asarray(tokens["completion_ids"], np.int32)
        if isinstance(tokens, ResponseTokens) and tokens.previous is previous and whole is None:
            prefix_length, added = tokens.prefix_length, np.asarray(tokens.new_prompt_ids, np.int32)
        else:
            before = _whole(previous) if previous is not None else whole
            prompt = np.asarray(tokens["prompt_ids"], np.int32)
            prefix_length = 0 if before is None else common_prefix(prompt, before)
            added = prompt[prefix_length:]
        made = _turns(prefix_length, added, completion, tokens, temperature)
        # Of a call in parts, the advantage is that of each; the reward stands once, at the last.
        if has_advantages:
            made = [replace(turn, advantage=step.get("advantage")) for turn in made]
        if has_rewards:
            made[-1] = replace(made[-1], reward=step.get("reward"))
        turns += made
        previous = tokens if isinstance(tokens, ResponseTokens) else None
        whole = None if previous is not None else _whole(tokens)
    return tuple(turns)


def common_prefix(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """Number of leading ids that agree."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def duration_of(state: Mapping[str, Any]) -> float:
    """Seconds that the rollout took, by its own account; 0 when it keeps none."""
    timing = state.get("timing") or {}
    total = timing.get("total") if isinstance(timing, Mapping) else getattr(timing, "total", None)
    return float(total) if isinstance(total, int | float) else 0.0


def _turns(
    prefix_length: int, added: NDArray[np.int32], completion: NDArray[np.int32], tokens: Any, temperature: float
) -> list[Turn]:
    """One call's turn, or one for each run of sampled ids; what lies between them is context."""
    whole = _turn(prefix_length, added, completion, tokens, temperature)
    mask = np.asarray(tokens.get("completion_mask") or [1] * len(completion), np.bool_)
    if mask.all():
        return [whole]
    runs = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2).tolist()
    if not mask[-1]:
        runs.append([len(completion), len(completion)])  # nothing sampled: what later calls continue
    turns: list[Turn] = []
    before, prefix, context = 0, prefix_length, added
    for start, stop in runs:
        run = slice(start, stop)
        context = np.concatenate([context, completion[before:start]])
        turns.append(Turn(prefix, context, completion[run], whole.logprobs[run], whole.versions[run], temperature))
        before, prefix, context = stop, prefix_length + len(added) + stop, completion[:0]
    return turns


def _turn(
    prefix_length: int, added: NDArray[np.int32], completion: NDArray[np.int32], tokens: Any, temperature: float
) -> Turn:
    logprobs = np.asarray(tokens["completion_logprobs"], np.float32)
    versions = np.asarray(tokens["completion_versions"], np.int32)
    if not len(logprobs) == len(versions) == len(completion):
        raise EnvironmentFault(
            f"a model call with {len(completion)} sampled ids has {len(logprobs)} logprobs and {len(versions)} "
            "versions; training wants one of each a token"
        )
    return Turn(prefix_length, added, completion, logprobs, versions, temperature)


def _whole(tokens: Mapping[str, Any]) -> NDArray[np.int32]:
    return np.concatenate([np.asarray(tokens["prompt_ids"], np.int32), np.asarray(tokens["completion_ids"], np.int32)])


def _plain(message: Any) -> dict[str, Any]:
    if hasattr(message, "model_dump"):
        dumped: dict[str, Any] = message.model_dump(exclude_none=True)
        return dumped
    return {key: value for key, value in dict(message).items() if value is not None}
