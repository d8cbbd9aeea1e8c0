"""Copies, exact and near.

Parts: `Seen`. Two chats are exact copies when question and answer are the same words, whatever the case and spacing;
near copies when both question and answer share most of their three-word runs (Jaccard's index of the shingles).
Candidates come from MinHash bands, so that each new chat is compared with few; the verdict is always the index itself.
Invariant: a short answer is never a near copy of another one, because two small answers that differ mean two things.
Source: Broder 1997, "On the resemblance and containment of documents".
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

NUM_HASHES, NUM_BANDS = 64, 16
SHINGLE_WORDS = 3
MIN_WORDS = 8
"""Fewer words than this have too few runs for their share to mean anything."""

_PRIME = (1 << 31) - 1
_WORD = re.compile(r"\w+|[^\w\s]")


class Seen:
    """What has been kept. `threshold` is the share of runs from which on a chat is a near copy; above 1 none is."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._exact: set[bytes] = set()
        self._runs: list[tuple[frozenset[int], frozenset[int]]] = []
        self._bands: dict[tuple[int, bytes], list[int]] = defaultdict(list)
        rng = np.random.default_rng(0)
        self._a = rng.integers(1, _PRIME, NUM_HASHES, dtype=np.int64)
        self._b = rng.integers(0, _PRIME, NUM_HASHES, dtype=np.int64)

    def verdict(self, question: str, answer: str) -> str | None:
        """ "copy" or "near copy" of something kept; None for a new chat, which is kept from now on."""
        asked, said = _words(question), _words(answer)
        name = hashlib.blake2b("\0".join((" ".join(asked), " ".join(said))).encode("utf-8", "replace")).digest()
        if name in self._exact:
            return "copy"
        if len(said) < MIN_WORDS or self._threshold > 1:
            self._exact.add(name)
            return None
        runs = (_runs(asked), _runs(said))
        bands = [(band, part.tobytes()) for band, part in enumerate(np.split(self._minhash(runs[1]), NUM_BANDS))]
        near = {index for key in bands for index in self._bands[key]}
        if any(all(_share(a, b) >= self._threshold for a, b in zip(runs, self._runs[i], strict=True)) for i in near):
            return "near copy"
        self._exact.add(name)
        for key in bands:
            self._bands[key].append(len(self._runs))
        self._runs.append(runs)
        return None

    def _minhash(self, runs: frozenset[int]) -> NDArray[np.int64]:
        values = np.fromiter(runs, np.int64, len(runs))
        hashed: NDArray[np.int64] = (self._a[:, None] * values[None, :] + self._b[:, None]) % _PRIME
        least: NDArray[np.int64] = hashed.min(axis=1)
        return least


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _runs(words: list[str]) -> frozenset[int]:
    """Runs of three words as 31-bit numbers, the same in every process; a shorter text is one run."""
    last = max(1, len(words) - SHINGLE_WORDS + 1)
    runs = (" ".join(words[at : at + SHINGLE_WORDS]) for at in range(last))
    return frozenset(
        int.from_bytes(hashlib.blake2b(run.encode("utf-8", "replace"), digest_size=4).digest(), "big") & _PRIME - 1
        for run in runs
    )


def _share(a: frozenset[int], b: frozenset[int]) -> float:
    return len(a & b) / len(a | b)
