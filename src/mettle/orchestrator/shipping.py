"""From ready groups to a shipped batch: lay end to end, write, and one transaction. Who trains it cuts it.

Invariant: the file is complete before the ledger names it, and the ledger moves the tasks and stores the orchestrator's
state in the same transaction, so a batch exists wholly or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mettle.orchestrator.batcher import ReadyGroup
from mettle.records.tokens import Batch, Sample, SampledBy, end_to_end
from mettle.storage.batches import write_batch
from mettle.storage.database import transaction_soon
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir


def assemble(step: int, groups: Sequence[ReadyGroup]) -> Batch:
    """Whole groups, one after the other, as the batch of `step`."""
    samples = [sample for group in groups for sample in group.samples]
    begins = accumulate((len(sample) for sample in samples), initial=0)
    return Batch(
        sequence_lengths=np.array([len(sample) for sample in samples], np.int32),
        step=step,
        draw_ids=tuple(group.draw_id for group in groups),
        staleness=token_staleness(step, samples),
        replicas=tuple(
            SampledBy(begin + own.start, begin + own.stop, own.replica)
            for begin, sample in zip(begins, samples, strict=False)
            for own in sample.replicas
        ),
        **end_to_end(samples),
    )


def token_staleness(step: int, samples: Sequence[Sample]) -> tuple[float, int]:
    """(mean, max) of (step - 1) - version over the sampled tokens."""
    versions = np.concatenate([sample.versions[sample.loss_mask] for sample in samples])
    return float(step - 1 - versions.mean()), int(step - 1 - versions.min())


async def ship(
    ledger: Ledger,
    run_dir: RunDir,
    batch: Batch,
    *,
    state: dict[str, Any],
    figures: Mapping[str, float],
    facts: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Write the batch, and make it that of its step together with the step's metrics and the facts of that moment."""
    digest, _ = await asyncio.to_thread(write_batch, run_dir.batches, batch)
    async with transaction_soon(ledger.database):
        ledger.ship(
            batch.step,
            digest,
            batch.draw_ids,
            num_sequences=len(batch.sequence_lengths),
            num_tokens=len(batch.token_ids),
            staleness=batch.staleness,
            orchestrator_state=state,
        )
        ledger.journal.record_metrics(batch.step, figures)
        for key, value in facts().items():
            ledger.journal.set_fact(key, value)
