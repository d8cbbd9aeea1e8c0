"""Rollouts with their tokens, appended to shard files.

A block is one group: an 8-byte length, a JSON header (everything but token arrays), then the arrays of all turns laid
end to end, column by column: new prompt ids, completion ids, logprobs, versions; last the arrays of the credit, in so
far as it is not in numbers that stand in the header. A block counts only once the ledger names it, so a write that was
cut short leaves unreferenced bytes and nothing else.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mettle.errors import StorageError
from mettle.records.tasks import Credit, GroupRecord, RolloutRecord, TaskDraw, Turn
from mettle.storage.files import storage_errors

SHARD_BYTES = 64 * 2**20
"""A shard is closed when it is larger than this."""


@dataclass(frozen=True, slots=True)
class BlockRef:
    """Where a block lies."""

    shard: str
    offset: int
    length: int


class ShardWriter:
    """Appends blocks to `shard-{k}.bin`. One writer a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with storage_errors(folder, "making"):
            folder.mkdir(parents=True, exist_ok=True)
        self._index = max((int(p.stem.split("-")[1]) for p in folder.glob("shard-*.bin")), default=0)

    def append(self, group: GroupRecord) -> BlockRef:
        """Write one group and return where it lies. Bytes are with the operating system when this returns."""
        data = encode_group(group)
        path = self._path()
        if path.exists() and path.stat().st_size + len(data) > SHARD_BYTES:
            self._index += 1
            path = self._path()
        with storage_errors(path, "appending to"):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                offset = os.fstat(handle).st_size
                written = 0
                while written < len(data):
                    written += os.write(handle, data[written:])
            finally:
                os.close(handle)
        return BlockRef(path.name, offset, len(data))

    def _path(self) -> Path:
        return self._folder / f"shard-{self._index:05d}.bin"


def read_group(folder: Path, ref: BlockRef) -> GroupRecord:
    """Read one group back. Raises: StorageError when the shard is missing or shorter than the reference."""
    path = folder / ref.shard
    with storage_errors(path, "reading"), path.open("rb") as file:
        file.seek(ref.offset)
        data = file.read(ref.length)
    if len(data) != ref.length:
        raise StorageError(f"{path} is cut short: {len(data)} of {ref.length} bytes at offset {ref.offset}")
    return decode_group(data)


def encode_group(group: GroupRecord) -> bytes:
    """The bytes of one block."""
    turns = [turn for rollout in group.rollouts for turn in rollout.turns]
    arrays: list[np.ndarray] = []
    header: dict[str, Any] = {
        "draw": [group.draw.draw_id, group.draw.env_id, group.draw.uid, group.draw.epoch, group.draw.example_id],
        "version_at_start": group.version_at_start,
        "rollouts": [_rollout_header(rollout, arrays) for rollout in group.rollouts],
    }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True, default=str).encode()
    columns = [
        *(np.asarray(t.new_prompt_ids, np.int32).tobytes() for t in turns),
        *(np.asarray(t.completion_ids, np.int32).tobytes() for t in turns),
        *(np.asarray(t.logprobs, np.float32).tobytes() for t in turns),
        *(np.asarray(t.versions, np.int32).tobytes() for t in turns),
        *(array.tobytes() for array in arrays),
    ]
    return b"".join([len(text).to_bytes(8, "little"), text, *columns])


def decode_group(data: bytes) -> GroupRecord:
    """The inverse of `encode_group`."""
    text_length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + text_length])
    shapes = [turn for rollout in header["rollouts"] for turn in rollout["turns"]]
    prompt_lengths = [shape[1] for shape in shapes]
    lengths = [shape[2] for shape in shapes]
    offset = 8 + text_length
    columns: list[list[np.ndarray]] = []
    for dtype, sizes in ((np.int32, prompt_lengths), (np.int32, lengths), (np.float32, lengths), (np.int32, lengths)):
        flat = np.frombuffer(data, dtype=dtype, count=sum(sizes), offset=offset)
        offset += flat.nbytes
        columns.append(np.split(flat, np.cumsum(sizes)[:-1]) if sizes else [])
    tail = np.frombuffer(data, dtype=np.float32, offset=offset)
    turns = iter(
        Turn(shape[0], prompt, ids, logprobs, versions, *shape[3:])
        for shape, prompt, ids, logprobs, versions in zip(shapes, *columns, strict=True)
    )
    rollouts = tuple(
        RolloutRecord(
            **{key: value for key, value in entry.items() if key not in ("turns", "credit")},
            turns=tuple(next(turns) for _ in entry["turns"]),
            credit=_credit(entry.get("credit"), tail),
        )
        for entry in header["rollouts"]
    )
    return GroupRecord(TaskDraw(*header["draw"]), header["version_at_start"], rollouts)


def _credit_header(credit: Credit, arrays: list[np.ndarray]) -> dict[str, Any]:
    """Numbers as they are; an array as `[start, length]`, in float32, in the last column of the block."""

    def entry(value: float | np.ndarray) -> float | list[int]:
        if isinstance(value, float):
            return value
        start = sum(len(array) for array in arrays)
        arrays.append(np.ascontiguousarray(value, np.float32))
        return [start, len(value)]

    return {
        name: value if isinstance(value, float) else [entry(part) for part in value] for name, value in credit.items()
    }


def _credit(header: dict[str, Any] | None, tail: np.ndarray) -> Credit | None:
    """The inverse of `_credit_header`."""
    if header is None:
        return None
    return {
        name: value
        if isinstance(value, float)
        else tuple(part if isinstance(part, float) else tail[part[0] : part[0] + part[1]] for part in value)
        for name, value in header.items()
    }


def _rollout_header(rollout: RolloutRecord, arrays: list[np.ndarray]) -> dict[str, Any]:
    return {
        "rollout_id": rollout.rollout_id,
        "reward": rollout.reward,
        "metrics": rollout.metrics,
        "messages": rollout.messages,
        "stop_condition": rollout.stop_condition,
        "is_truncated": rollout.is_truncated,
        "duration_s": rollout.duration_s,
        "error_kind": rollout.error_kind,
        "error": rollout.error,
        "advantage": rollout.advantage,
        "answer": rollout.answer,
        "credit": None if rollout.credit is None else _credit_header(rollout.credit, arrays),
        "turns": [_turn_header(turn) for turn in rollout.turns],
    }


def _turn_header(turn: Turn) -> list[float | None]:
    shape: list[float | None] = [
        turn.prefix_length,
        len(turn.new_prompt_ids),
        len(turn.completion_ids),
        turn.temperature,
    ]
    return shape if turn.reward is None and turn.advantage is None else [*shape, turn.reward, turn.advantage]
