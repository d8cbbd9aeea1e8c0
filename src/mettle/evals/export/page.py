"""An evaluation as one self-contained HTML file.

Parts: `write_page`. The page is `page.html` with its figures and conversations in it as JSON. Invariants: the file asks
nobody for anything (its content security policy forbids it to), and nothing that a model or an environment said becomes
markup or script: it is data inside a script element that cannot be closed from within, put on the page as text.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from mettle.errors import StorageError
from mettle.evals.estimator import mean_of
from mettle.evals.export.theme import BAR, digest, style
from mettle.evals.facts import RolloutFacts
from mettle.evals.output import messages_of
from mettle.evals.passing import PassRule
from mettle.evals.reader import EvaluationReader
from mettle.evals.report import by_task, plain
from mettle.records.tasks import content_of

TEMPLATE = "page.html"
NUM_BARS = 20
MAX_MESSAGE_CHARS = 200_000
"""A longer message is cut in the page, and says so; the results have all of it."""


def write_page(reader: EvaluationReader, path: Path, *, num_rollouts: int | None = None) -> None:
    """Write `path`, with the conversations of the first `num_rollouts` (None: all).

    Raises: StorageError when it cannot be written.
    """
    template = resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    script = template.partition("<script>")[2].partition("</script>")[0]
    policy = f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style())}'"
    title = f"{reader.entry.env_id} with {reader.entry.model}"
    before, _, after = template.partition("{{data}}")
    before = before.replace("{{style}}", style()).replace("{{bar}}", BAR)
    before = before.replace("{{policy}}", html.escape(policy)).replace("{{title}}", html.escape(title))
    try:
        with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(before)
            file.writelines(_data(reader, num_rollouts))
            file.write(after)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def _data(reader: EvaluationReader, num_rollouts: int | None) -> Iterator[str]:
    """The page's data as script elements: the summary, then one element for each conversation."""
    yield _element("summary", _summary(reader))
    for index, row in enumerate(reader.rows()):
        if num_rollouts is not None and index >= num_rollouts:
            return
        yield _element(f"rollout-{index}", _conversation(row))


def _element(name: str, value: Any) -> str:
    # Inside a script element only "</script" and "<!--" mean anything, and neither is left when "<" is escaped.
    text = json.dumps(value, ensure_ascii=True, default=str).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def _summary(reader: EvaluationReader) -> dict[str, Any]:
    tasks = sorted(by_task(reader.facts).items(), key=lambda task: _place(task[0]))
    metadata = {k: v for k, v in reader.metadata.items() if k not in ("stats", "tools", "launch")}
    metadata |= {"env_id": reader.entry.env_id, "model": reader.entry.model}
    return {
        "metadata": metadata,
        "stats": plain(reader.stats()),
        "bars": _bars([facts.reward for facts in reader.facts if facts.reward is not None]),
        "tasks": [_task(example, task, reader.pass_rule) for example, task in tasks],
        "rollouts": [_line(facts, reader.pass_rule) for facts in reader.facts],
        "num_broken": reader.num_broken,
    }


def _place(example: Any) -> tuple[bool, float, str]:
    """Numbered tasks by their number, then the others by their name."""
    is_number = isinstance(example, int | float)
    return not is_number, float(example) if is_number else 0.0, str(example)


def _bars(rewards: list[float]) -> list[dict[str, float]]:
    """How many rollouts have a reward in each of equal ranges."""
    if not rewards:
        return []
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    counts = [0] * NUM_BARS
    for reward in rewards:
        counts[min(NUM_BARS - 1, int((reward - low) / (high - low) * NUM_BARS))] += 1
    width = (high - low) / NUM_BARS
    return [{"from": low + i * width, "to": low + (i + 1) * width, "count": count} for i, count in enumerate(counts)]


def _task(example: Any, task: list[RolloutFacts], rule: PassRule) -> dict[str, Any]:
    rewards = [facts.reward for facts in task if facts.reward is not None]
    return {
        "id": example,
        "mean": mean_of(rewards) if rewards else None,
        "passed": sum(map(rule.holds, task)),
        "scored": len(rewards),
        "failed": len(task) - len(rewards),
    }


def _line(facts: RolloutFacts, rule: PassRule) -> list[Any]:
    """What the table of rollouts shows, as a list to keep the page small."""
    stop = facts.error_type if facts.cause else facts.stop_condition
    figures = [facts.example_id, facts.reward, stop, facts.output_tokens, facts.total_s]
    return [*figures, facts.excerpt, bool(facts.cause), rule.holds(facts)]


def _conversation(row: dict[str, Any]) -> dict[str, Any]:
    messages = [*messages_of(row.get("prompt")), *messages_of(row.get("completion"))]
    return {
        "messages": [_message(message) for message in messages],
        "answer": row.get("answer"),
        "info": row.get("info"),
        "metrics": row.get("metrics"),
        "error": row.get("error"),
        "usage": row.get("token_usage"),
    }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call if isinstance(call, str) else json.dumps(call) for call in message.get("tool_calls") or []]
    shown = {"role": str(message.get("role", "text")), "text": _cut(content_of(message))}
    if message.get("reasoning_content"):
        shown["reasoning"] = _cut(str(message["reasoning_content"]))
    return {**shown, **({"calls": [_cut(call) for call in calls]} if calls else {})}


def _cut(text: str) -> str:
    if len(text) <= MAX_MESSAGE_CHARS:
        return text
    return f"{text[:MAX_MESSAGE_CHARS]}\n[{len(text) - MAX_MESSAGE_CHARS} more characters are in the results]"
