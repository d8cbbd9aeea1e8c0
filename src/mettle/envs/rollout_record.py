"""A finished state as a rollout record.

Parts: `record_of_state`; `output_of`, the same as a published row. The tokens of each model call are kept as what they
add to the call before (`Turn`). Ids inside a completion that the policy did not sample (a mask says so) become the
prompt of a further turn. A rollout without tokens (an endpoint that does not tell them) has no turns and cannot train,
but can be evaluated. Invariant: whatever an environment put into its state, there is a record of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mettle.envs.errors import ErrorChain
from mettle.envs.state import OWN_REWARD
from mettle.errors import EnvironmentFault
from mettle.evals.output import output_row
from mettle.records.messages import ResponseTokens
from mettle.records.tasks import UNSCORED, RolloutRecord, Turn


def record_of_state(
    state: Mapping[str, Any],
    rollout_id: str,
    *,
    uid: str = "",
    position: int | None = None,
    columns: Sequence[str] = (),
    temperature: float | None = None,
    has_advantages: bool = False,
    is_for_training: bool = False,
) -> RolloutRecord:
    """One finished state as a record; `columns` are keys of the state to keep besides.

    Tokens without a logprob and a version each cannot train: they are left out, or with `is_for_training` refused.

    With `has_advantages` the environment's own advantages are kept; otherwise they are what its rubric makes of the
    rewards, which is for whoever trains to decide.
    """
    error = state.get("error")
    prompt, completion = plain_messages(state.get("prompt")), plain_messages(state.get("completion"))
    timing = _timing(state.get("timing"))
    metrics = state.get("metrics") or {}
    finite = {str(name): float(value) for name, value in metrics.items() if _is_finite(value)}
    kept = {name: state.get(name) for name in columns}
    if len(finite) != len(metrics):
        kept.setdefault("metrics", metrics)  # What is no figure is published, and in no average.
    if temperature is None:
        temperature = float((state.get("sampling_args") or {}).get("temperature") or 1.0)
    reward = float(state["reward"]) if error is None and _is_finite(state.get("reward")) else None
    kind, error_type, message, chain = _error(error, reward)
    try:
        trajectory = state.get("trajectory") or ()
        turns = turns_of(trajectory, temperature, state.get("reward"), has_advantages=has_advantages)
    except (KeyError, TypeError, ValueError, EnvironmentFault):
        if is_for_training:
            raise
        turns = ()
    return RolloutRecord(
        rollout_id,
        reward,
        finite,
        [*prompt, *completion],
        turns,
        state.get("stop_condition"),
        bool(state.get("is_truncated")),
        _seconds(timing, "total") or 0.0,
        kind,
        message,
        state.get("advantage") if has_advantages else None,
        state.get("answer") or "",
        state.get("example_id", 0),
        uid,
        position,
        len(prompt),
        state.get("info") or None,
        bool(state.get("is_completed", True)),
        error_type,
        None if chain is None else str(chain),
        None if chain is None else repr(chain),
        _seconds(timing, "model"),
        _seconds(timing, "env"),
        _seconds(timing, "scoring"),
        timing,
        token_usage(state.get("trajectory") or ()),
        [dict(tool) for tool in state.get("tool_defs") or ()],
        kept,
    )


def output_of(state: Mapping[str, Any], columns: Sequence[str] = (), task_key: str | None = None) -> dict[str, Any]:
    """A finished state as a row of the published results."""
    return output_row(record_of_state(state, "", uid=task_key or "", columns=columns))


def token_usage(trajectory: Iterable[Mapping[str, Any]]) -> dict[str, float] | None:
    """Sums over the rollout's model calls, and the sizes of its last conversation; None where nobody counted."""
    usages = [step["response"].usage for step in trajectory if step.get("response")]
    counted = [usage for usage in usages if usage is not None]
    if not counted:
        return None
    completion_total = sum(usage.completion_tokens or 0 for usage in counted)
    last_total = counted[-1].total_tokens or 0
    return {
        "input_tokens": float(sum(usage.prompt_tokens or 0 for usage in counted)),
        "output_tokens": float(completion_total),
        "final_input_tokens": float(max(0, last_total - completion_total)),
        "final_output_tokens": float(completion_total),
    }


def turns_of(
    trajectory: Sequence[Mapping[str, Any]],
    temperature: float,
    reward: float | None = None,
    *,
    has_advantages: bool = False,
) -> tuple[Turn, ...]:
    """The model calls of a trajectory, each as what it adds to the one before.

    Steps keep the rewards that the environment gave them, and not that of the rollout, `reward`, which scoring gives to
    those without one. Where nobody noted which is which, steps that all have the rollout's have none of their own.
    """
    turns: list[Turn] = []
    unnoted = [step.get("reward") for step in trajectory if OWN_REWARD not in step]
    is_own_unless_noted = len(unnoted) < len(trajectory) or any(value not in (None, reward) for value in unnoted)
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
        due = step.get("reward") if step.get(OWN_REWARD, is_own_unless_noted) else None
        advantage = step.get("advantage") if has_advantages else None
        turns += _turns(prefix_length, added, completion, tokens, temperature, due, advantage)
        previous = tokens if isinstance(tokens, ResponseTokens) else None
        whole = None if previous is not None else _whole(tokens)
    return tuple(turns)


def common_prefix(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """Number of leading ids that agree."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def _turns(
    prefix_length: int,
    added: NDArray[np.int32],
    completion: NDArray[np.int32],
    tokens: Any,
    temperature: float,
    reward: float | None,
    advantage: float | None,
) -> list[Turn]:
    """One call's turn, or one for each run of sampled ids; what lies between them is context.

    The advantage is that of each part; the reward is the whole call's, and stands once, at its last part.
    """
    logprobs, versions = _checked(tokens, completion)
    experts = np.asarray(tokens.get("completion_experts") or (), np.int16).reshape(len(completion), -1)
    chosen = experts if experts.size else None
    replica = str(tokens.get("replica") or "")
    mask = np.asarray(tokens.get("completion_mask") or [1] * len(completion), np.bool_)
    if mask.all():
        return [
            Turn(prefix_length, added, completion, logprobs, versions, temperature, reward, advantage, chosen, replica)
        ]
    runs = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2).tolist()
    if not mask[-1]:
        runs.append([len(completion), len(completion)])  # nothing sampled: what later calls continue
    turns: list[Turn] = []
    before, prefix, context = 0, prefix_length, added
    for start, stop in runs:
        run = slice(start, stop)
        context = np.concatenate([context, completion[before:start]])
        due = reward if [start, stop] == runs[-1] else None
        own = None if chosen is None else chosen[run]
        turns.append(
            Turn(
                prefix,
                context,
                completion[run],
                logprobs[run],
                versions[run],
                temperature,
                due,
                advantage,
                own,
                replica,
            )
        )
        before, prefix, context = stop, prefix_length + len(added) + stop, completion[:0]
    return turns


def _checked(tokens: Any, completion: NDArray[np.int32]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    logprobs = np.asarray(tokens["completion_logprobs"], np.float32)
    versions = np.asarray(tokens["completion_versions"], np.int32)
    if not len(logprobs) == len(versions) == len(completion):
        raise EnvironmentFault(
            f"a model call with {len(completion)} sampled ids has {len(logprobs)} logprobs and {len(versions)} "
            "versions; training wants one of each a token"
        )
    return logprobs, versions


def _whole(tokens: Mapping[str, Any]) -> NDArray[np.int32]:
    return np.concatenate([np.asarray(tokens["prompt_ids"], np.int32), np.asarray(tokens["completion_ids"], np.int32)])


def plain_messages(given: Any) -> list[dict[str, Any]]:
    """Messages as plain dicts without empty fields; bare text is one message."""
    if isinstance(given, str):
        return [{"role": "text", "content": given}]
    return [_plain(message) for message in given or ()]


def _plain(message: Any) -> dict[str, Any]:
    if hasattr(message, "model_dump"):
        dumped: dict[str, Any] = message.model_dump(exclude_none=True)
        return dumped
    return {key: value for key, value in message.items() if value is not None}


def _error(error: Any, reward: float | None) -> tuple[str | None, str | None, str | None, ErrorChain | None]:
    """(kind, type, message, chain of causes) of what a state calls its error."""
    if error is None:
        return (None if reward is not None else UNSCORED), None, None, None
    if not isinstance(error, BaseException):
        return EnvironmentFault.kind, type(error).__name__, str(error), None
    name, kind = type(error).__name__, getattr(error, "kind", None)
    if kind is None:  # What nobody attributed was put there by the environment's own code.
        return EnvironmentFault.kind, name, f"{name}: {error}", ErrorChain(error)
    return kind, name, str(error) or name, ErrorChain(error)


def _timing(timing: Any) -> dict[str, Any] | None:
    if timing is None:
        return None
    found: dict[str, Any] = timing.to_dict() if hasattr(timing, "to_dict") else dict(timing)
    return found


def _seconds(timing: Mapping[str, Any] | None, name: str) -> float | None:
    value = None if timing is None else timing.get(name)
    if isinstance(value, Mapping):
        value = value.get("duration")
    return float(value) if isinstance(value, int | float) else None


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and math.isfinite(value)
