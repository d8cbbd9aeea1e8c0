"""An evaluation by Inspect as one of ours: each sample a row of the results, its header as metadata.

Parts: `inspect_metadata`, `inspect_row`, `reward_scorer`. The reward is one score of the sample, all are metrics. A
word as a score is a number as Inspect's own means take it: C 1, P 0.5, I and N 0, yes and true 1, no and false 0. A
sample without a score that is a number has no reward; one that failed has an error. What a scorer said of its score
and the sample's metadata stand in `info`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from mettle.errors import UserError

WORDS: Final = {
    "C": 1.0, "CORRECT": 1.0, "P": 0.5, "PARTIAL": 0.5, "I": 0.0, "INCORRECT": 0.0, "N": 0.0, "NOANSWER": 0.0,
    "YES": 1.0, "TRUE": 1.0, "NO": 0.0, "FALSE": 0.0,
}  # fmt: skip
CUT_STOPS: Final = ("max_tokens", "model_length")
MAX_TRACEBACK_CHARS: Final = 20_000
_ATTACHMENT: Final = "attachment://"
_ERROR: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_.]*)\((.*)\)", re.DOTALL)


def reward_scorer(header: Mapping[str, Any], wanted: str = "") -> str:
    """The name of the score that is the reward: the one wanted, or the first of the log, as its headline has it.

    Raises: UserError when the log has no such score.
    """
    results = _table(header.get("results"))
    scores = [each for each in _list(results.get("scores")) if isinstance(each, dict)]
    names = [_score_name(str(each.get("scorer") or each.get("name")), str(each.get("name"))) for each in scores]
    if not names:  # It did not come to an end; the scorers that were asked for are known.
        scorers = _list(_table(header.get("eval")).get("scorers"))
        names = [str(each.get("name")) for each in scorers if isinstance(each, dict)]
    headline = _table(results.get("headline"))
    first = _score_name(str(headline["scorer"]), str(headline.get("score"))) if headline.get("scorer") else ""
    if wanted and names and wanted not in names:
        raise UserError(f"the log has no score {wanted!r}; it has {', '.join(names)}")
    return wanted or (first if first in names else next(iter(names), ""))


def inspect_metadata(header: Mapping[str, Any], scorer: str) -> dict[str, Any]:
    """What the log says of the evaluation, in the words of `metadata.json`."""
    told, stats = _table(header.get("eval")), _table(header.get("stats"))
    dataset, config = _table(told.get("dataset")), _table(told.get("config"))
    limit = config.get("limit")
    ids = _list(dataset.get("sample_ids"))
    num_examples = len(ids) or (limit if isinstance(limit, int) else dataset.get("samples"))
    sampling = {k: v for k, v in _table(told.get("model_generate_config")).items() if v is not None}
    begun, ended = _time(stats.get("started_at")), _time(stats.get("completed_at"))
    packages = _table(told.get("packages"))
    return {
        "env_id": str(told.get("task") or "task"), "env_args": _table(told.get("task_args")),
        "model": str(told.get("model") or "?"), "sampling_args": sampling,
        "num_examples": num_examples if isinstance(num_examples, int) else None,
        "rollouts_per_example": config.get("epochs") if isinstance(config.get("epochs"), int) else 1,
        "date": str(told.get("created") or ""),
        "time": ended - begun if begun is not None and ended is not None and ended >= begun else None,
        "version_info": {"env_version": str(told.get("task_version"))},
        "framework": "inspect_ai",
        "source": {
            "framework": "inspect_ai", "version": packages.get("inspect_ai"), "status": header.get("status"),
            "eval_id": told.get("eval_id") or told.get("run_id"), "task_id": told.get("task_id"), "score": scorer,
        },
    }  # fmt: skip


def inspect_row(sample: Mapping[str, Any], scorer: str, model: str) -> dict[str, Any]:
    """A sample as a row of `results.jsonl`. `scorer` is the reward's, `model` the one whose tokens are counted."""
    sample = _attached(sample)
    messages = [_message(each) for each in _list(sample.get("messages")) if isinstance(each, dict)]
    prompt, completion = _parted(messages) if messages else (_asked(sample.get("input")), [])
    scores = _scores(sample)
    metrics: dict[str, float] = {}
    for name, score in scores.items():
        metrics.update(_numbers(name, _table(score).get("value", score)))
    error = _error(sample.get("error"))
    limit, stop = _table(sample.get("limit")), _stop(sample)
    target = sample.get("target", "")
    return {
        "example_id": sample.get("id"), "prompt": prompt, "completion": completion,
        "answer": target[0] if isinstance(target, list) and len(target) == 1 else target,
        "info": _info(sample, scores),
        "reward": None if error else metrics.get(scorer),
        "error": error,
        "timing": {"total": _number(sample.get("total_time")) or 0.0, "model": _model_s(sample)},
        "is_completed": error is None,
        "is_truncated": bool(limit) or stop in CUT_STOPS,
        "stop_condition": f"limit: {limit.get('type')}" if limit else stop,
        "metrics": metrics, "tool_defs": _tools(sample), "token_usage": _usage(sample, model),
    }  # fmt: skip


def _score_name(scorer: str, name: str) -> str:
    """A score of a scorer that gives several is called by both."""
    return scorer if name in ("", scorer, "None") else f"{scorer}.{name}"


def _scores(sample: Mapping[str, Any]) -> dict[str, Any]:
    scores = _table(sample.get("scores"))
    if not scores and isinstance(sample.get("score"), dict):  # logs of 2024
        scores = {"score": sample["score"]}
    return {str(name): score for name, score in scores.items()}


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """The score of a name as metrics; one of several parts is several."""
    if isinstance(value, dict):
        for part, each in value.items():
            yield from _numbers(f"{name}.{part}", each)
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from _numbers(f"{name}.{place}", each)
    else:
        number = _number(WORDS.get(value.strip().upper(), value) if isinstance(value, str) else value)
        if number is not None:
            yield name, number


def _info(sample: Mapping[str, Any], scores: Mapping[str, Any]) -> dict[str, Any]:
    """What explains the sample: its metadata and choices, and what each scorer said."""
    said = {
        name: {key: score[key] for key in ("value", "answer", "explanation", "metadata") if score.get(key)}
        for name, score in scores.items()
        if isinstance(score, dict)
    }
    found = {"metadata": sample.get("metadata"), "choices": sample.get("choices"), "scores": said}
    return {"epoch": sample.get("epoch"), **{name: value for name, value in found.items() if value}}


def _error(error: Any) -> dict[str, Any] | None:
    if not error:
        return None
    told = error if isinstance(error, dict) else {"message": str(error)}
    message = str(told.get("message") or "")
    found = _ERROR.fullmatch(message.strip())
    kind, said = (found[1].rpartition(".")[2], found[2].strip("'\"")) if found else ("Error", message)
    trace = str(told.get("traceback") or "")[-MAX_TRACEBACK_CHARS:]
    return {"error": kind, "message": said, "error_chain_str": message, "error_chain_repr": trace or message}


def _parted(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(what was asked, what came of it): the second begins with the first message that the model said itself."""
    first = next((i for i, each in enumerate(messages) if each["role"] == "assistant"), len(messages))
    return messages[:first], messages[first:]


def _asked(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return [_message(each) for each in _list(value) if isinstance(each, dict)]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat completions have it."""
    content, reasoning = message.get("content", ""), ""
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {"type": "text", "text": str(part)} for part in content]
        reasoning = "\n".join(_reasoning(part) for part in parts if part.get("type") == "reasoning")
        kept = [_part(part) for part in parts if part.get("type") != "reasoning"]
        is_text = all(part["type"] == "text" for part in kept)
        content = "\n".join(part["text"] for part in kept) if is_text else kept
    made: dict[str, Any] = {"role": str(message.get("role", "?")), "content": content}
    if reasoning:
        made["reasoning_content"] = reasoning
    calls = [call for call in _list(message.get("tool_calls")) if isinstance(call, dict)]
    if calls:  # as published rows have them, each as text
        made["tool_calls"] = [
            json.dumps({"id": call.get("id"), "name": call.get("function"), "arguments": call.get("arguments")})
            for call in calls
        ]
    if message.get("tool_call_id"):
        made["tool_call_id"] = str(message["tool_call_id"])
    error = _table(message.get("error")).get("message")
    if error and not content:
        made["content"] = str(error)
    return made


def _reasoning(part: Mapping[str, Any]) -> str:
    if part.get("redacted"):
        return str(part.get("summary") or "[hidden by the provider]")
    return str(part.get("reasoning", ""))


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(part.get("type", "part"))
    if kind == "text":
        return {"type": "text", "text": str(part.get("text", ""))}
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": str(part.get("image", ""))}}
    if kind == "tool_use":  # a tool that the provider ran itself
        said = f"{part.get('name', '')}({part.get('arguments', '')}) -> {part.get('error') or part.get('result', '')}"
        return {"type": "text", "text": said}
    return {"type": "text", "text": f"[{kind}]"}


def _stop(sample: Mapping[str, Any]) -> str | None:
    choices = _list(_table(sample.get("output")).get("choices"))
    reason = _table(choices[-1]).get("stop_reason") if choices else None
    return None if reason is None else str(reason)


def _usage(sample: Mapping[str, Any], model: str) -> dict[str, float] | None:
    """Tokens of the evaluated model; those of models that judge are not the policy's."""
    every = {str(name): _table(usage) for name, usage in _table(sample.get("model_usage")).items()}
    counted = [every[model]] if model in every else list(every.values())
    if not counted:
        return None

    def total(*names: str) -> float:
        return float(sum(_number(usage.get(name)) or 0.0 for usage in counted for name in names))

    # Tokens that were read from a cache are no part of Inspect's input tokens, and were read by the model.
    read = ("input_tokens", "input_tokens_cache_read", "input_tokens_cache_write")
    return {"input_tokens": total(*read), "output_tokens": total("output_tokens")}


def _model_s(sample: Mapping[str, Any]) -> float | None:
    """Seconds that the model took, summed over its calls; None in a log without events."""
    calls = [_number(event.get("working_time")) for event in _events(sample)]
    known = [seconds for seconds in calls if seconds is not None]
    return float(sum(known)) if known else None


def _tools(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tools that the model had at its first call."""
    tools = next((_list(event.get("tools")) for event in _events(sample)), [])
    kept = ("name", "description", "parameters")
    return [{name: tool[name] for name in kept if name in tool} for tool in tools if isinstance(tool, dict)]


def _events(sample: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Calls of the model."""
    return (each for each in _list(sample.get("events")) if isinstance(each, dict) and each.get("event") == "model")


def _attached(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The sample with its long texts in their places; a log stores each once, aside. Events stay as they are."""
    texts = _table(sample.get("attachments"))

    def placed(value: Any) -> Any:
        if isinstance(value, str) and value.startswith(_ATTACHMENT):
            return texts.get(value.removeprefix(_ATTACHMENT), value)
        if isinstance(value, dict):
            return {key: placed(each) for key, each in value.items()}
        return [placed(each) for each in value] if isinstance(value, list) else value

    shown = ("input", "target", "choices", "messages", "output", "scores", "score", "metadata", "error")
    return {**sample, **{name: placed(sample[name]) for name in shown if name in sample}} if texts else dict(sample)


def _time(value: Any) -> float | None:
    try:
        return datetime.fromisoformat(str(value).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None


def _number(value: Any) -> float | None:
    try:
        number = math.nan if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
