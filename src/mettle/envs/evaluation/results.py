"""Results as they are published: one JSON line per rollout, and a metadata file.

Parts: `output_of` (a finished state as a row), `ResultsFolder` (append, replace metadata, read back for resuming).
The format is that of verifiers 0.3: `results.jsonl` beside `metadata.json`, assistant tool calls as JSON strings, each
metric again as a key of the row. Invariants: rows are appended whole and metadata is replaced by rename, so a process
that is killed leaves at most one broken last line, which reading skips.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mettle.envs.errors import ErrorChain, error_data
from mettle.envs.state import State
from mettle.errors import StorageError, UserError

logger = logging.getLogger(__name__)

RESULTS, METADATA = "results.jsonl", "metadata.json"


def output_of(state: State, state_columns: Sequence[str] = ()) -> dict[str, Any]:
    """A finished rollout as a row of the results."""
    source = state["input"]
    error = state.get("error")
    metrics = state.get("metrics") or {}
    output: dict[str, Any] = {
        "example_id": source.get("example_id", 0),
        "prompt": saved_messages(source["prompt"]),
        "completion": saved_messages(state.get("completion") or []),
    }
    output.update({key: source[key] for key in ("answer", "info") if source.get(key)})
    output.update(
        reward=state.get("reward"),
        error=error_data(error) if error is not None else None,
        timing=state["timing"].to_dict(),
        is_completed=state["is_completed"],
        is_truncated=state["is_truncated"],
        stop_condition=state.get("stop_condition"),
        metrics=metrics,
        tool_defs=[dict(tool) for tool in state.get("tool_defs") or []],
    )
    if state["trajectory"]:
        output["token_usage"] = token_usage(state)
    if error is not None:
        output["error_chain"] = str(ErrorChain(error))
        output["long_error_chain"] = repr(ErrorChain(error))
    for name, value in metrics.items():
        output.setdefault(name, value)
    output.update({name: state.get(name) for name in state_columns})
    return output


def token_usage(state: State) -> dict[str, float]:
    """Sums over the rollout's model calls, and the sizes of its last conversation."""
    usages = [step["response"].usage for step in state["trajectory"] if step.get("response")]
    counted = [usage for usage in usages if usage is not None]
    completion_total = sum(usage.completion_tokens or 0 for usage in counted)
    last_total = (counted[-1].total_tokens or 0) if counted else 0
    return {
        "input_tokens": float(sum(usage.prompt_tokens or 0 for usage in counted)),
        "output_tokens": float(completion_total),
        "final_input_tokens": float(max(0, last_total - completion_total)),
        "final_output_tokens": float(completion_total),
    }


def saved_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as plain dicts; tool calls as JSON strings."""
    saved = []
    for message in messages:
        plain = {key: value for key, value in message.items() if value is not None}
        if plain.get("tool_calls"):
            plain["tool_calls"] = [c if isinstance(c, str) else json.dumps(c) for c in plain["tool_calls"]]
        saved.append(plain)
    return saved


def json_line(output: Mapping[str, Any]) -> str:
    """A row as one line; what JSON does not know is written as text."""
    line = json.dumps(output, ensure_ascii=False, default=_as_json) + "\n"
    try:
        line.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON can write it escaped, UTF-8 cannot
        line = json.dumps(output, default=_as_json) + "\n"
    return line


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    for method in ("model_dump", "to_dict", "tolist"):
        if hasattr(value, method):
            return getattr(value, method)()
    return str(value)


class ResultsFolder:
    """The folder of one evaluation."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def is_there(self) -> bool:
        """True when an evaluation was saved here."""
        return (self.path / RESULTS).is_file() and (self.path / METADATA).is_file()

    def append(self, outputs: Iterable[Mapping[str, Any]]) -> None:
        """Add rows."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with (self.path / RESULTS).open("a", encoding="utf-8") as file:
                file.write("".join(json_line(output) for output in outputs))
        except OSError as error:
            raise StorageError(f"cannot write {self.path / RESULTS}: {error.strerror}; rows before are safe") from error

    def replace_rows(self, outputs: Iterable[Mapping[str, Any]]) -> None:
        """Make the file hold exactly these rows."""
        self._replace(RESULTS, "".join(json_line(output) for output in outputs))

    def write_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata."""
        kept = {key: value for key, value in metadata.items() if key not in ("date", "path_to_save")}
        self._replace(METADATA, json.dumps(kept, ensure_ascii=False, default=_as_json, indent=2) + "\n")

    def read_metadata(self) -> dict[str, Any]:
        """The metadata as it was saved."""
        try:
            metadata: dict[str, Any] = json.loads((self.path / METADATA).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot resume from {self.path}: {METADATA}: {error}") from error
        return metadata

    def read_rows(self) -> list[dict[str, Any]]:
        """The rows that can be read; a broken line, or one without an example, is skipped."""
        rows = []
        with (self.path / RESULTS).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                except ValueError:
                    row = None
                if isinstance(row, dict) and "example_id" in row:
                    rows.append(row)
                else:
                    logger.warning("skipped line %d of %s, which is no result", number, self.path / RESULTS)
        return rows

    def _replace(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.{os.getpid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.path / name)
        except OSError as error:
            raise StorageError(f"cannot write {self.path / name}: {error.strerror}") from error
