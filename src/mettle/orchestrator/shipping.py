"""From ready groups to a shipped batch: sweep, take, pack, write, and one transaction.

Invariant: the file is complete before the ledger names it, and the ledger moves the tasks and stores the orchestrator's
state in the same transaction, so a batch exists wholly or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mettle.orchestrator.batcher import ReadyGroup
from mettle.orchestrator.config import PackingConfig
from mettle.orchestrator.packing import pack
from mettle.records.tokens import Batch, Sample
from mettle.storage.batches import write_batch
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir


def assemble(step: int, groups: Sequence[ReadyGroup], config: PackingConfig, metrics: Mapping[str, float]) -> Batch:
    """Pack whole groups into the batch of `step`."""
    samples = [sample for group in groups for sample in group.samples]
    ranks = pack(
        samples,
        layout=config.layout,
        max_tokens=config.micro_batch_tokens,
        max_rows=config.micro_batch_rows,
        num_ranks=config.num_ranks,
    )
    draw_ids = tuple(sorted(group.draw_id for group in groups))
    return Batch(step, ranks, draw_ids, token_staleness(step, samples), dict(metrics))


def token_staleness(step: int, samples: Sequence[Sample]) -> tuple[float, int]:
    """(mean, max) of (step - 1) - version over the sampled tokens."""
    versions = np.concatenate([sample.versions[sample.loss_mask] for sample in samples])
    return float(step - 1 - versions.mean()), int(step - 1 - versions.min())


async def ship(
    ledger: Ledger,
    run_dir: RunDir,
    batch: Batch,
    num_sequences: int,
    *,
    state: dict[str, Any],
    figures: Mapping[str, float],
) -> None:
    """Write the batch, and make it that of its step together with the step's metrics."""
    digest, _ = await asyncio.to_thread(write_batch, run_dir.batches, batch)
    with ledger.database.transaction():
        ledger.ship(
            batch.step,
            digest,
            batch.draw_ids,
            num_sequences=num_sequences,
            num_tokens=sum(len(micro.token_ids) for rank in batch.ranks for micro in rank),
            staleness=batch.staleness,
            orchestrator_state=state,
        )
        ledger.journal.record_metrics(batch.step, figures)
