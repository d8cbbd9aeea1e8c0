"""A batch made again from what it was made of: the groups in the shards, which the ledger names.

Invariant: what is returned has the digest under which the batch was shipped, to the last bit, or it is an error.
"""

from __future__ import annotations

import hashlib

from mettle.errors import StorageError
from mettle.orchestrator.batcher import ReadyGroup
from mettle.orchestrator.config import OrchestratorConfig
from mettle.orchestrator.samples import group_samples
from mettle.orchestrator.shipping import assemble
from mettle.records.tokens import Batch
from mettle.storage.batches import encode_batch
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.shards import read_group


def rebuild_batch(run_dir: RunDir, ledger: Ledger, config: OrchestratorConfig, step: int) -> Batch:
    """The batch of `step`. Raises: StorageError when a shard is damaged, or holds something else."""
    row = ledger.batch(step)
    if row is None:
        raise StorageError(f"step {step} has no batch in the ledger")
    groups = []
    for draw_id, ref in ledger.groups_of(step):
        group = read_group(run_dir.rollouts, ref)
        samples = group_samples(group, seq_len=config.seq_len, keep_zero_advantages=not config.filter_zero_advantages)
        if samples:
            groups.append(ReadyGroup.of(draw_id, samples))
    if not groups:
        raise StorageError(f"the batch of step {step} cannot be rebuilt: the ledger names no groups for it")
    batch = assemble(step, groups)
    found = hashlib.sha256(encode_batch(batch)).hexdigest()
    if found != row.digest:
        raise StorageError(
            f"the batch of step {step} cannot be rebuilt: the shards make {found[:12]}, not {row.digest[:12]}"
        )
    return batch
