"""A set of chats on disk: training and held-out rows with their origin, and a summary.

    train.jsonl, held_out.jsonl    {"messages": [...], "tools": [...], "provenance": {...}}, one a line
    train.parquet, ...             the same as columns; tools, calls and provenance as JSON text
    summary.json                   what was kept and what was left out, and why

Parts: `RolloutOrigin` (where rollouts came from), `write_dataset`, `Written`. Invariant: files are replaced by
rename, and the same rollouts under the same rules give the same bytes, but for the date.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mettle.errors import StorageError, UserError
from mettle.evals.estimator import mean_of
from mettle.synthesis.config import Format, Rules
from mettle.synthesis.selection import Kept, KeptRollouts

TRAIN, HELD_OUT, SUMMARY = "train", "held_out", "summary.json"


@dataclass(frozen=True, slots=True)
class RolloutOrigin:
    """What is the same for all rollouts of a set."""

    environment: str
    model: str
    sampling: dict[str, Any]
    env_args: dict[str, Any]
    seed: int | None
    rollouts_per_task: int | None


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: files, and the figures of `summary.json`."""

    path: Path
    files: list[str]
    summary: dict[str, Any]


def source_of(metadata: Mapping[str, Any]) -> RolloutOrigin:
    """The source that the metadata of an evaluation describes."""
    version = (metadata.get("version_info") or {}).get("env_version")
    env_id = str(metadata.get("env_id") or "unknown")
    named = env_id if "@" in env_id or not version else f"{env_id}@{version}"
    sampling = {
        k: v for k, v in (metadata.get("sampling_args") or {}).items() if (k, v) not in (("n", 1), ("extra_body", {}))
    }
    return RolloutOrigin(
        named,
        str(metadata.get("model") or "unknown"),
        sampling,
        dict(metadata.get("env_args") or {}),
        metadata.get("shuffle_seed"),
        metadata.get("rollouts_per_example"),
    )


def write_dataset(
    folder: Path,
    selection: KeptRollouts,
    source: RolloutOrigin,
    rules: Rules,
    formats: Sequence[Format],
    created_at: float | None = None,
) -> Written:
    """Write the set into `folder`.

    Raises: UserError when nothing was kept; StorageError when it cannot be written.
    """
    if not selection.train and not selection.held_out:
        reasons = "; ".join(f"{num} {reason}" for reason, num in selection.left_out.most_common())
        raise UserError(
            f"none of {selection.num_rollouts} rollouts was kept: {reasons}; lower --min-reward, or look at them"
        )
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created_at))
    files = []
    counts = {}
    for side, kept in ((TRAIN, selection.train), (HELD_OUT, selection.held_out)):
        lines = list(_lines(kept, source, now))
        counts[side] = {"chats": len(lines), "rollouts": len(kept), "tasks": len({each.task for each in kept})}
        for name in formats:
            files.append(_write(folder, f"{side}.{name}", lines, name))
    summary = {
        "created_at": now,
        "source": asdict(source),
        "rules": {name: getattr(rules, name) for name in Rules.model_fields},
        **counts,
        "num_rollouts": selection.num_rollouts,
        "num_tasks": len(selection.tasks),
        "num_tasks_without_a_row": len(selection.tasks - {k.task for k in (*selection.train, *selection.held_out)}),
        "left_out": dict(selection.left_out.most_common()),
        "mean_reward": _mean([float(kept.row["reward"]) for kept in (*selection.train, *selection.held_out)]),
        "files": files,
    }
    _replace(folder / SUMMARY, (json.dumps(summary, indent=2, default=str) + "\n").encode())
    return Written(folder, files, summary)


def _lines(kept: Iterable[Kept], source: RolloutOrigin, created_at: str) -> Iterator[dict[str, Any]]:
    for each in kept:
        for chat in each.chats:
            provenance = {
                "environment": source.environment,
                "env_args": source.env_args,
                "model": source.model,
                "sampling": source.sampling,
                "seed": source.seed,
                "reward": each.row["reward"],
                "metrics": each.row.get("metrics") or {},
                "task": each.task,
                "example_id": each.row.get("example_id"),
                "rollout": each.index,
                "turn": chat.turn,
                "num_turns": chat.num_turns,
                "created_at": created_at,
            }
            yield {"messages": chat.messages, "tools": chat.tools or None, "provenance": provenance}


def _write(folder: Path, name: str, lines: Sequence[Mapping[str, Any]], form: str) -> str:
    if form == "jsonl":
        _replace(folder / name, "".join(json.dumps(line, default=str) + "\n" for line in lines).encode())
    else:
        _replace(folder / name, _parquet(lines))
    return name


def _parquet(lines: Sequence[Mapping[str, Any]]) -> bytes:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise UserError("parquet needs pyarrow; pip install 'mettle-lab[data]'") from error
    message = pa.struct(
        [(name, pa.string()) for name in ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")]
    )
    schema = pa.schema(
        [
            ("messages", pa.list_(message)),
            ("tools", pa.string()),
            ("reward", pa.float64()),
            ("task", pa.string()),
            ("provenance", pa.string()),
        ]
    )
    rows = [
        {
            "messages": [{key: _cell(each.get(key)) for key in message.names} for each in line["messages"]],
            "tools": _cell(line["tools"]),
            "reward": float(line["provenance"]["reward"]),
            "task": line["provenance"]["task"],
            "provenance": json.dumps(line["provenance"], default=str),
        }
        for line in lines
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink)
    return bytes(sink.getvalue())


def _cell(value: Any) -> str | None:
    text = value if value is None or isinstance(value, str) else json.dumps(value, default=str)
    return None if text is None else text.encode("utf-8", "replace").decode()


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; what was there is as it was") from error


def _mean(values: Sequence[float]) -> float | None:
    return mean_of(values) if values else None
