"""What a submitted run will take, told before it is queued: tokens, time, memory.

Nothing is measured here, which would take the machine from the run that runs (`mettle rl plan` does that): tokens and
seconds are as of the newest runs of the same model and environments, and where there is none, tokens are the most that
the sequences can hold and nothing is said of time. Memory is what the weights alone take, from their headers.
Invariant: what cannot fit is refused before it is queued.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, select

from mettle.config import Loaded
from mettle.errors import UserError
from mettle.hub import tables
from mettle.hub.training import jobs
from mettle.hub.training.jobs import TrainingJob
from mettle.hub.training.usage import price_of
from mettle.web.problems import HttpError

_LOOKED_AT: Final = 5
"""Earlier runs whose pace counts."""


def plan_job(c: Connection, loaded: Loaded[Any], model: str, environments: list[str]) -> dict[str, Any]:
    """`num_tokens`, `seconds` or None, `memory_bytes` or None, `usd`, `seq_len`, and `basis`: where they are from.

    Raises: HttpError 422 for a model that does not fit this machine.
    """
    from mettle.runs.fit import check_fit, least_memory_bytes

    config = loaded.config
    try:
        check_fit(config)
    except UserError as error:
        raise HttpError(422, str(error).replace(str(config.model.path), model), param="model") from error
    sequences = config.max_steps * config.orchestrator.batch_size
    rates = [rate for job in _earlier(c, model, environments) if (rate := _rate(job)) is not None]
    if rates:
        tokens = sequences * sum(rate[0] for rate in rates) / len(rates)
        seconds: float | None = sequences * sum(rate[1] for rate in rates) / len(rates)
        basis = f"as the {len(rates)} newest runs of its kind" if len(rates) > 1 else "as the newest run of its kind"
    else:
        tokens, seconds = sequences * config.orchestrator.seq_len, None
        basis = "at most: no run of its kind has ended here yet"
    return {
        "num_tokens": round(tokens), "seconds": seconds, "memory_bytes": least_memory_bytes(config), "basis": basis,
        "usd": tokens * price_of(c, model) / 1e6, "seq_len": config.orchestrator.seq_len,
    }  # fmt: skip


def _earlier(c: Connection, model: str, environments: list[str]) -> list[TrainingJob]:
    """The newest runs that have ended well, of the same model on the same environments."""
    j = tables.jobs.c
    rows = c.execute(
        select(tables.jobs)
        .where(j.kind == jobs.TRAIN, j.model == model, j.status == jobs.COMPLETED, j.num_tokens > 0)
        .order_by(j.created_at.desc())
        .limit(10 * _LOOKED_AT)
    )
    found = (TrainingJob(**row._mapping) for row in rows)
    return [job for job in found if sorted(job.environments) == sorted(environments)][:_LOOKED_AT]


def _rate(job: TrainingJob) -> tuple[float, float] | None:
    """Tokens and seconds for each sequence; None for one that ran in pieces."""
    if job.started_at is None or job.ended_at is None or (job.planned or {}).get("is_resumed"):
        return None
    sequences = job.config["max_steps"] * job.config["orchestrator"]["batch_size"]
    return job.num_tokens / sequences, (job.ended_at - job.started_at) / sequences
