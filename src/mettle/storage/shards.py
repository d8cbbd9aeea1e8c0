"""Rollouts with their tokens, appended to shard files.

A block is one group, or those of its rollouts that ended together: an 8-byte length, a JSON header (everything but
token arrays), then the arrays of all turns laid end to end, column by column: new prompt ids, completion ids, logprobs,
versions, experts where a mixture's engine told them (the header says how many a token, in `experts`); last the arrays
of the credit, where it is not in numbers, which stand in the header. A block counts only once the ledger names it, so a
write that was cut short leaves unreferenced bytes and nothing else.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from mettle.errors import StorageError
from mettle.records.tasks import Credit, GroupRecord, RolloutRecord, TaskDraw, Turn
from mettle.storage.files import link_or_copy, storage_errors
from mettle.storage.plain_json import json_bytes

SHARD_BYTES = 64 * 2**20
"""A shard is closed when it is larger than this."""


@dataclass(frozen=True, slots=True)
class BlockRef:
    """Where a block lies."""

    shard: str
    offset: int
    length: int


class ShardWriter:
    """Appends blocks to `{prefix}-{k}.bin`. One writer a folder and prefix."""

    def __init__(self, folder: Path, prefix: str = "shard") -> None:
        self._folder = folder
        self._prefix = prefix
        with storage_errors(folder, "making"):
            folder.mkdir(parents=True, exist_ok=True)
        self._index = max((int(p.stem.rpartition("-")[2]) for p in folder.glob(f"{prefix}-*.bin")), default=0)

    def append(self, group: GroupRecord) -> BlockRef:
        """Write one group and return where it lies. Bytes are with the operating system when this returns."""
        return self.append_all([group])[0]

    def append_all(self, groups: Sequence[GroupRecord]) -> list[BlockRef]:
        """Write groups one after the other into one shard; where each lies."""
        blocks = [encode_group(group) for group in groups]
        data = b"".join(blocks)
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
        refs = []
        for block in blocks:
            refs.append(BlockRef(path.name, offset, len(block)))
            offset += len(block)
        return refs

    def _path(self) -> Path:
        return self._folder / f"{self._prefix}-{self._index:05d}.bin"


def take_shards(source: Path, target: Path) -> None:
    """Give a new folder the shards of another, which may be appended to meanwhile: a closed shard is shared with it,
    the newest of each prefix is copied, because both folders go on with it."""
    target.mkdir(parents=True)
    shards = sorted(source.glob("*-*.bin"))
    open_ones = {path.stem.rpartition("-")[0]: path for path in shards}
    for path in shards:
        take = shutil.copy2 if path in open_ones.values() else link_or_copy
        take(path, target / path.name)


def read_group(folder: Path, ref: BlockRef) -> GroupRecord:
    """Read one group back. Raises: StorageError when the shard is missing, cut short or damaged."""
    path = folder / ref.shard
    with storage_errors(path, "reading"):
        handle = os.open(path, os.O_RDONLY)
        try:
            data = os.pread(handle, ref.length, ref.offset)
        finally:
            os.close(handle)
    if len(data) != ref.length:
        raise StorageError(f"{path} is cut short: {len(data)} of {ref.length} bytes at offset {ref.offset}")
    try:
        return decode_group(data)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        # RuntimeError is a StopIteration from inside a generator: fewer turns than the header says.
        raise StorageError(f"{path} is damaged at offset {ref.offset}: {error}") from error


def encode_group(group: GroupRecord) -> bytes:
    """The bytes of one block."""
    turns = [turn for rollout in group.rollouts for turn in rollout.turns]
    arrays: list[np.ndarray] = []
    width = max((turn.experts.shape[1] for turn in turns if turn.experts is not None), default=0)
    header: dict[str, Any] = {
        "draw": [group.draw.draw_id, group.draw.env_id, group.draw.uid, group.draw.epoch, group.draw.example_id],
        "version_at_start": group.version_at_start,
        "rollouts": [_rollout_header(rollout, arrays) for rollout in group.rollouts],
    }
    if width:
        header["experts"] = width
    text = json_bytes(header)
    columns = [
        *(np.asarray(t.new_prompt_ids, np.int32).tobytes() for t in turns),
        *(np.asarray(t.completion_ids, np.int32).tobytes() for t in turns),
        *(np.asarray(t.logprobs, np.float32).tobytes() for t in turns),
        *(np.asarray(t.versions, np.int32).tobytes() for t in turns),
        *(_experts_of(t, width).tobytes() for t in turns if width),
        *(array.tobytes() for array in arrays),
    ]
    return b"".join([len(text).to_bytes(8, "little"), text, *columns])


def decode_group(data: bytes) -> GroupRecord:
    """The inverse of `encode_group`."""
    text_length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + text_length])
    shapes = [turn for rollout in header["rollouts"] for turn in rollout["turns"]]
    turns, tail = _decode_turns(data, 8 + text_length, shapes, header.get("experts", 0))
    rollouts = tuple(
        RolloutRecord(
            **{key: value for key, value in entry.items() if key not in ("turns", "credit")},
            turns=tuple(next(turns) for _ in entry["turns"]),
            credit=_credit(entry.get("credit"), tail),
        )
        for entry in header["rollouts"]
    )
    return GroupRecord(TaskDraw(*header["draw"]), header["version_at_start"], rollouts)


def _experts_of(turn: Turn, width: int) -> np.ndarray:
    """[N, width]; -1 where the engine did not tell."""
    if turn.experts is None:
        return np.full((len(turn.completion_ids), width), -1, np.int16)
    return np.ascontiguousarray(turn.experts, np.int16)


def _decode_turns(data: bytes, offset: int, shapes: list[list[Any]], width: int) -> tuple[Iterator[Turn], np.ndarray]:
    """The turns of all rollouts, one after the other, and what follows their columns."""
    if not shapes:
        return iter(()), np.frombuffer(data, dtype=np.float32, offset=offset)
    prompt_lengths = [shape[1] for shape in shapes]
    lengths = [shape[2] for shape in shapes]
    columns: list[list[np.ndarray]] = []
    for dtype, sizes in ((np.int32, prompt_lengths), (np.int32, lengths), (np.float32, lengths), (np.int32, lengths)):
        flat = np.frombuffer(data, dtype=dtype, count=sum(sizes), offset=offset)
        offset += flat.nbytes
        columns.append(np.split(flat, np.cumsum(sizes)[:-1]))
    flat = np.frombuffer(data, dtype=np.int16, count=sum(lengths) * width, offset=offset)
    offset += flat.nbytes
    experts = np.split(flat.reshape(sum(lengths), width), np.cumsum(lengths)[:-1])
    turns = (
        Turn(shape[0], prompt, ids, logprobs, versions, *_notes(shape), chosen if width else None, _replica(shape))
        for shape, prompt, ids, logprobs, versions, chosen in zip(shapes, *columns, experts, strict=True)
    )
    return turns, np.frombuffer(data, dtype=np.float32, offset=offset)


def _notes(shape: list[Any]) -> tuple[float, float | None, float | None]:
    """A turn's temperature, reward and advantage."""
    temperature, reward, advantage = [*shape[3:], None, None][:3]
    return temperature, reward, advantage


def _replica(shape: list[Any]) -> str:
    """The engine that sampled a turn; a block may be older than the question."""
    return str(shape[6]) if len(shape) > 6 else ""


def _credit_header(credit: Credit, arrays: list[np.ndarray]) -> dict[str, Any]:
    """Numbers as they are; an array as `[start, *shape]`, in float32, in the last column of the block."""

    def entry(value: float | np.ndarray) -> float | list[int]:
        if isinstance(value, float):
            return value
        start = sum(array.size for array in arrays)
        arrays.append(np.ascontiguousarray(value, np.float32))
        return [start, *value.shape]

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
        else tuple(part if isinstance(part, float) else _credit_array(tail, *part) for part in value)
        for name, value in header.items()
    }


def _credit_array(tail: np.ndarray, start: int, *shape: int) -> np.ndarray:
    return tail[start : start + math.prod(shape)].reshape(shape)


def _rollout_header(rollout: RolloutRecord, arrays: list[np.ndarray]) -> dict[str, Any]:
    """The fields of a rollout that differ from their defaults; turns as shapes, whose tokens are in the columns."""
    header: dict[str, Any] = {"turns": [_turn_header(turn) for turn in rollout.turns]}
    for (name, default), value in zip(_DEFAULTS, _values_of(rollout), strict=True):
        if value is default or (type(value) is type(default) and value == default):
            continue  # Of another type nothing is asked: an author's value may be an array.
        header[name] = _credit_header(value, arrays) if name == "credit" else value
    return header


def _turn_header(turn: Turn) -> list[float | str | None]:
    shape: list[float | str | None] = [
        turn.prefix_length,
        len(turn.new_prompt_ids),
        len(turn.completion_ids),
        turn.temperature,
    ]
    if turn.replica:
        return [*shape, turn.reward, turn.advantage, turn.replica]
    if turn.reward is None and turn.advantage is None:
        return shape
    return [*shape, turn.reward, turn.advantage]


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


_DEFAULTS = [(field.name, _default(field)) for field in fields(RolloutRecord) if field.name != "turns"]
_values_of = attrgetter(*(name for name, _ in _DEFAULTS))
