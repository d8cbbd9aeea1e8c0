"""Publishing a policy version: one safetensors file and a canary, visible at once by rename. Where adapters are trained
the file holds theirs alone, a few hundred kB instead of the model.

The canary is a few token sequences with the log-probabilities that the trainer itself computes for them under exactly
the published weights, in float32. An engine that cannot reproduce them serves something else.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mettle.errors import StorageError
from mettle.records.tokens import Batch
from mettle.records.versions import WeightVersion
from mettle.storage.files import sha256_file, storage_errors
from mettle.storage.weights import AdapterNotes, Canary, publish_weights, read_version, weight_file
from mettle.trainer.adapter import peft_config
from mettle.trainer.layout import Index, Layout, bare_targets
from mettle.trainer.learner import Learner
from mettle.trainer.loading import full_state
from mettle.trainer.model import Policy
from mettle.trainer.tenant_files import adapter_tensors
from mettle.trainer.weight_writer import write_weights
from mettle.trainer.world import World

CANARY_TOKENS = 64
"""Longest canary sequence; a longer one is cut."""
FIXED_CANARY_SEED = 7


def publish_version(
    root: Path, version: int, learner: Learner, sequences: list[Index], *, served_as: str | None = None
) -> WeightVersion:
    """Publish what is trained as v{version}; every rank calls it, rank 0 writes, all get the result."""
    write = version_writer(root, version, learner, sequences, served_as=served_as)
    return learner.world.share(write.publish() if write is not None else None)


def version_writer(
    root: Path, version: int, learner: Learner, sequences: list[Index], *, served_as: str | None = None
) -> VersionWriter | None:
    """What is trained, ready to be written as v{version}. Every rank calls it; rank 0 gets the writer."""
    canary = compute_canary(learner.policy, sequences, learner.world)
    state = published_state(learner)
    if not learner.world.is_main:
        return None
    return VersionWriter(root, version, state, canary, _notes(learner), served_as)


@dataclass(frozen=True, slots=True)
class VersionWriter:
    """The parts of a version. On one CPU rank `state` is the live weights: write them before they change."""

    root: Path
    version: int
    state: Mapping[str, Tensor]
    canary: Canary
    notes: AdapterNotes | None
    served_as: str | None

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return sum(tensor.nbytes for tensor in self.state.values())

    def publish(self) -> WeightVersion:
        """Write it. A folder that already holds the same bytes is left as it is, so that an engine reading it is not
        disturbed."""
        final = self.root / f"v{self.version}"
        published = _same_already(final, self._save) if final.exists() else None
        return published or publish_weights(
            self.root, self.version, self._save, self.canary, adapter=self.notes, served_as=self.served_as
        )

    def _save(self, path: Path) -> str:
        with storage_errors(path, "writing weights"):
            return write_weights(self.state, path)


def published_state(learner: Learner) -> dict[str, Tensor]:
    """The tensors of a version: all weights, or the adapter's under PEFT's names. Every rank calls it."""
    return full_state(learner.policy) if learner.tenant.is_base else adapter_tensors(learner.tenant)


def _notes(learner: Learner) -> AdapterNotes | None:
    adapter = learner.tenant.adapter
    if adapter is None:
        return None
    return AdapterNotes(peft_config(adapter, learner.policy.network, None), learner.base_digest)


def canary_sequences(batch: Batch, number: int) -> list[Index]:
    """Sequences of a batch for its canary: from all over the batch, cut to `CANARY_TOKENS`."""
    ends = np.cumsum(batch.sequence_lengths)
    pairs = zip(ends - batch.sequence_lengths, ends, strict=True)
    found = [batch.token_ids[start:end][:CANARY_TOKENS].astype(np.int64) for start, end in pairs if end - start > 1]
    return found[:: max(1, len(found) // number)][:number]


def fixed_sequences(vocab_size: int, number: int) -> list[Index]:
    """Sequences of random ids, always the same, for a version that no batch made."""
    rng = np.random.default_rng(FIXED_CANARY_SEED)
    return [rng.integers(0, vocab_size, size=16) for _ in range(number)]


@torch.no_grad()
def compute_canary(policy: Policy, sequences: Sequence[Index], world: World) -> Canary:
    """The canary of these sequences under the policy as it is."""
    lengths = np.array([len(s) for s in sequences])
    shape = (len(sequences), int(lengths.max()))
    token_ids, logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    for row, sequence in enumerate(sequences):
        token_ids[row, : len(sequence)] = sequence
    rows, columns = np.nonzero(np.arange(shape[1])[None] < (lengths - 1)[:, None])
    layout = _scoring_layout(token_ids, rows, columns)
    labels_K = torch.from_numpy(layout.targets.token_ids).to(world.device)
    temperatures_K = torch.ones(len(rows), device=world.device)
    scored = policy(layout, labels_K, temperatures_K, is_exact=True)
    logprobs[rows, columns + 1] = scored.logprobs_K.cpu().numpy()
    return Canary(token_ids.astype(np.int32), lengths.astype(np.int32), logprobs)


def _scoring_layout(token_ids: Index, rows: Index, columns: Index) -> Layout:
    targets = bare_targets(token_ids[rows, columns + 1])
    positions = np.broadcast_to(np.arange(token_ids.shape[1]), token_ids.shape)
    sources = rows * token_ids.shape[1] + columns
    return Layout("padded", token_ids, positions, None, sources, targets, np.arange(len(sources)))


def _same_already(final: Path, save: Callable[[Path], str]) -> WeightVersion | None:
    try:
        there = read_version(final)
    except StorageError:
        return None
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{final.name}.check.") as scratch:
        path = Path(scratch) / "weights"
        is_same = save(path) == there.digest == sha256_file(weight_file(there))
    return there if is_same else None
