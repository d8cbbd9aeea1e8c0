"""Results of other programs taken into a folder of evaluations, where all that reads evaluations finds them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mettle.errors import UserError
from mettle.evals.inspect_log import InspectLog
from mettle.evals.inspect_rows import inspect_metadata, inspect_row, reward_scorer
from mettle.evals.reader import EvaluationReader
from mettle.evals.report import plain
from mettle.evals.results import METADATA, ResultsFolder
from mettle.storage.files import write_json


class ImportedEvaluation(NamedTuple):
    """Where the results are, and what is to be told of them."""

    path: Path
    num_rollouts: int
    scorer: str
    status: str


def import_inspect_log(log_path: Path, output_dir: Path, scorer: str = "") -> ImportedEvaluation:
    """Write a log's results under `output_dir`; the same log again replaces what it left.

    Raises: UserError when it is no log of Inspect or has no sample or no such score; StorageError.
    """
    log = InspectLog(log_path)
    try:
        chosen = reward_scorer(log.header, scorer)
        metadata = inspect_metadata(log.header, chosen)
        folder = output_dir / _folder_name(metadata["env_id"], metadata["model"]) / _id_of(log)
        num = _write(log, ResultsFolder(folder), metadata, chosen)
    finally:
        log.close()
    # The statistics are those of the rows as they are read, by the estimator that all evaluations share.
    reader = EvaluationReader(folder)
    stats = reader.stats()
    metadata |= {
        "avg_reward": None if stats["reward"] is None else stats["reward"].mean,
        "avg_error": sum(facts.cause is not None for facts in reader.facts) / num,
        "stats": plain(stats),
    }
    write_json(folder / METADATA, metadata)
    return ImportedEvaluation(folder, num, chosen, str(log.header.get("status") or "unknown"))


def _write(log: InspectLog, results: ResultsFolder, metadata: Mapping[str, Any], scorer: str) -> int:
    """Publish the log's rows; how many there are."""
    names: set[str] = set()
    num = 0
    try:
        for sample in log.samples():
            row = inspect_row(sample, scorer, metadata["model"])
            names.update(row["metrics"])
            results.add(row)
            num += 1
        if not num:
            raise UserError(f"{log.path} has no samples: it is a log's header alone, or nothing had ended yet")
        if names and scorer not in names:
            known = ", ".join(sorted(names))
            raise UserError(f"no sample of {log.path} has the score {scorer!r} as a number; --score takes {known}")
        results.publish(metadata)
    except RecursionError:
        raise UserError(f"{log.path} has a sample that is nested too deeply") from None
    finally:
        results.discard()
    return num


def _folder_name(env_id: str, model: str) -> str:
    words = (re.sub(r"[^A-Za-z0-9._@+-]+", "-", each.replace("/", "--"))[:100] for each in (env_id, model))
    return "--".join(words)


def _id_of(log: InspectLog) -> str:
    """The same for a log and its conversions."""
    told = log.header["eval"]
    known = [str(told.get(name)) for name in ("eval_id", "run_id", "task_id", "created")]
    return hashlib.blake2b("\n".join(known).encode(), digest_size=4).hexdigest()
