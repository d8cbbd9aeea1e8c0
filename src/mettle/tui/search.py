"""Looking for a text in conversations, without stopping the browser.

Parts: `Needle` (a text, whatever the case), `texts_of` (everything that is said in a rollout), `scan`. Invariant:
`scan` runs in a thread, reads one rollout at a time, reports as it goes and ends soon after it is asked to.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mettle.errors import MettleError
from mettle.evals.output import messages_of
from mettle.evals.reader import EvaluationReader
from mettle.records.tasks import content_of

REPORT_INTERVAL_S = 0.1


class Needle:
    """A text to look for, whatever the case."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._pattern = re.compile(re.escape(text), re.IGNORECASE)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where it stands in `text`."""
        return [match.span() for match in self._pattern.finditer(text)]

    def is_in(self, row: Mapping[str, Any]) -> bool:
        """Whether anything in this rollout holds it."""
        return any(self._pattern.search(text) for text in texts_of(row))


def texts_of(row: Mapping[str, Any]) -> Iterator[str]:
    """What was said, called, thought, expected and reported in a rollout."""
    for message in (*messages_of(row.get("prompt")), *messages_of(row.get("completion"))):
        yield content_of(message)
        if message.get("reasoning_content"):
            yield str(message["reasoning_content"])
        for call in message.get("tool_calls") or ():
            yield " ".join(call_of(call))
    for name in ("answer", "info", "error"):
        value = row.get(name)
        if value:
            yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def call_of(call: Any) -> tuple[str, str]:
    """The name and the arguments of a tool call as it was saved: an object, its JSON, or in OpenAI's nesting."""
    if isinstance(call, str):
        try:
            call = json.loads(call)
        except (ValueError, RecursionError):
            return "", call
    if not isinstance(call, Mapping):
        return "", str(call)
    nested = call.get("function")
    inner = nested if isinstance(nested, Mapping) else call
    arguments = inner.get("arguments", "")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return str(inner.get("name") or ""), text


def scan(
    reader: EvaluationReader,
    indexes: Sequence[int],
    is_wanted: Callable[[Mapping[str, Any]], bool],
    on_progress: Callable[[int, list[int]], None],
    is_stopped: Callable[[], bool],
) -> list[int] | None:
    """Those of `indexes` whose rollout is wanted; None when it was stopped.

    `on_progress` hears how many were looked at, and which were found since it was last told.
    """
    found: list[int] = []
    told, last = 0, time.monotonic()
    for count, index in enumerate(indexes, 1):
        if is_stopped():
            return None
        try:
            if is_wanted(reader.row(index)):
                found.append(index)
        except MettleError:  # The file was rewritten under the search: that row is gone.
            continue
        if time.monotonic() - last > REPORT_INTERVAL_S:
            on_progress(count, found[told:])
            told, last = len(found), time.monotonic()
    on_progress(len(indexes), found[told:])
    return found
