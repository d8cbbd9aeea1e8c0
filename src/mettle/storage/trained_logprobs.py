"""The trainer's log-probabilities of the tokens that it trained, beside the batch that they are of.

`batches/{digest}.logprobs`, little-endian, S sequences that train and K tokens trained in them:

    "MTLP", version, S, K                    u32, u32, u64, u64
    a digest of each sequence's tokens       S x 8 bytes
    its length, and its tokens trained       S x u32, S x u32
    place of each token in its sequence      K x u32
    natural-log probability of each          K x f32

A sequence is known by its tokens, so that a reader needs no batch, and rows that begin alike are told apart.
Parts: `write_trained_logprobs`, `TrainedLogprobs`. Invariants: they go when their batch goes; nothing of a run depends
on them, so one that is missing or damaged is as if it had never been.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from mettle.records.tokens import Batch, FloatArray, IntArray
from mettle.storage.files import write_atomic

_HEAD: Final = struct.Struct("<4sIQQ")
_MAGIC: Final = b"MTLP"
_VERSION: Final = 1
_DIGEST: Final = np.dtype("V8")


def logprobs_path(folder: Path, digest: str) -> Path:
    """Where those of the batch of a digest lie."""
    return folder / f"{digest}.logprobs"


def write_trained_logprobs(
    folder: Path, digest: str, batch: Batch, members: NDArray[np.int64], logprobs: FloatArray
) -> None:
    """Write what the trainer thought of the tokens at `members` [K] of a batch, in rising order.

    Raises: StorageError when the disk refuses.
    """
    lengths = batch.sequence_lengths.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    owners = np.searchsorted(starts + lengths, members, side="right")
    trained, num_tokens = np.unique(owners, return_counts=True)
    tokens = np.ascontiguousarray(batch.token_ids, "<i4")
    digests = b"".join(_digest(tokens[starts[s] : starts[s] + lengths[s]]) for s in trained)
    data = [
        _HEAD.pack(_MAGIC, _VERSION, len(trained), len(members)), digests, lengths[trained].astype("<u4").tobytes(),
        num_tokens.astype("<u4").tobytes(), (members - starts[owners]).astype("<u4").tobytes(),
        np.ascontiguousarray(logprobs, "<f4").tobytes(),
    ]  # fmt: skip
    write_atomic(logprobs_path(folder, digest), b"".join(data))


@dataclass(frozen=True, slots=True)
class TrainedLogprobs:
    """Those of one batch: of each sequence its `digests` [S], `lengths` [S] and where its tokens end, `ends` [S]; of
    each token `places` and `logprobs` [K]."""

    digests: NDArray[Any]
    lengths: NDArray[np.uint32]
    ends: NDArray[np.int64]
    places: NDArray[np.uint32]
    logprobs: NDArray[np.float32]

    @classmethod
    def read(cls, folder: Path, digest: str) -> Self | None:
        """None where there are none that can be read."""
        try:
            data = logprobs_path(folder, digest).read_bytes()
        except OSError:
            return None
        if len(data) < _HEAD.size:
            return None
        magic, version, num_sequences, num_tokens = _HEAD.unpack_from(data)
        if magic != _MAGIC or version != _VERSION or len(data) != _HEAD.size + 16 * num_sequences + 8 * num_tokens:
            return None
        offset, arrays = _HEAD.size, []
        for kind, count in ((_DIGEST, num_sequences), ("<u4", num_sequences), ("<u4", num_sequences),
                            ("<u4", num_tokens), ("<f4", num_tokens)):  # fmt: skip
            arrays.append(np.frombuffer(data, kind, count, offset))
            offset += arrays[-1].nbytes
        ends = np.cumsum(arrays[2], dtype=np.int64)
        return cls(arrays[0], arrays[1], ends, arrays[3], arrays[4])

    def of(self, token_ids: IntArray) -> FloatArray | None:
        """Those of a sequence [N], NaN where a token was not trained; None where the batch had no such sequence.

        A batch may have held the beginning of it alone, cut at the length that all sequences are cut at.
        """
        tokens = np.ascontiguousarray(token_ids, "<i4")
        longest = int(self.lengths.max(initial=0))
        for length in {len(tokens), min(longest, len(tokens))}:
            wanted = np.frombuffer(_digest(tokens[:length]), _DIGEST)
            found = np.flatnonzero((self.lengths == length) & (self.digests == wanted))
            if len(found):
                last = int(found[0])
                place = slice(int(self.ends[last - 1]) if last else 0, int(self.ends[last]))
                values = np.full(len(tokens), np.nan, np.float32)
                values[self.places[place]] = self.logprobs[place]
                return values
        return None


def _digest(tokens: NDArray[Any]) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=_DIGEST.itemsize).digest()
