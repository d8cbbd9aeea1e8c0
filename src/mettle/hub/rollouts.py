"""Rollouts: a page of them by filter, and one opened with its tokens and its siblings."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mettle.errors import StorageError
from mettle.hub.models import RolloutDetail, RolloutPage, ShownRollout, Sibling, TokenColumns, TurnDetail
from mettle.hub.vocabulary import Vocabulary, id_texts, load_vocabulary
from mettle.records.tasks import Credit, RolloutRecord, Turn, content_of
from mettle.records.tokens import FloatArray
from mettle.storage.database import Database
from mettle.storage.run_dir import RunDir
from mettle.storage.shards import BlockRef, read_group

PAGE_SIZE = 50
PROMPT_CHARS = 80
ADVANTAGES = "advantages"
WEIGHTS = ("rl_weights", "ce_weights", "ref_kl_weights", "distill_weights")
"""Columns of the credit: a token that has none of these weights is in no component of the loss."""

SortKey = Literal["newest", "oldest", "reward", "-reward", "tokens", "duration", "advantage"]

ORDERS: dict[str, str] = {
    "newest": "r.rowid DESC",
    "oldest": "r.rowid",
    "reward": "r.reward IS NULL, r.reward, r.rowid",
    "-reward": "r.reward IS NULL, r.reward DESC, r.rowid",
    "tokens": "r.num_tokens DESC, r.rowid",
    "duration": "r.duration_s DESC, r.rowid",
    "advantage": "r.advantage IS NULL, r.advantage DESC, r.rowid",
}

COLUMNS = (
    "r.rollout_id, r.kind, r.env_id, r.draw_id, t.uid, r.eval_id, r.step, r.position, r.reward, r.advantage, r.metrics,"
    " r.num_turns, r.num_tokens, r.version_min, r.version_max, r.stop_condition, r.is_truncated, r.error_kind, r.error,"
    " r.duration_s, r.created_at, coalesce(r.excerpt, '') AS excerpt"
)


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Which rollouts to show. None leaves a condition out."""

    step: int | None = None
    kind: str | None = None
    env_id: str | None = None
    draw_id: int | None = None
    eval_id: int | None = None
    min_reward: float | None = None
    is_error: bool = False
    words: str = ""
    sort: SortKey = "newest"

    def where(self) -> tuple[str, list[Any]]:
        """The SQL condition and its parameters."""
        conditions, parameters = ["1"], []
        for column, value in (
            ("r.step =", self.step), ("r.kind =", self.kind), ("r.env_id =", self.env_id),
            ("r.draw_id =", self.draw_id), ("r.eval_id =", self.eval_id), ("r.reward >=", self.min_reward),
        ):  # fmt: skip
            if value is not None:
                conditions.append(f"{column} ?")
                parameters.append(value)
        if self.step is not None and self.kind is None:
            # The index begins with the kind; without it a look at one step would read the whole table.
            conditions.append("r.kind IN ('train', 'eval')")
        for word in self.words.split():
            pattern = "%" + word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
            conditions.append("(r.excerpt LIKE ? ESCAPE '\\' OR r.error LIKE ? ESCAPE '\\')")
            parameters += [pattern] * 2
        if self.is_error:
            conditions.append("r.error_kind IS NOT NULL")
        return " AND ".join(conditions), parameters


def find_rollouts(database: Database, chosen: RolloutFilter, page: int, page_size: int = PAGE_SIZE) -> RolloutPage:
    """One page; a page past the end is the last one."""
    where, parameters = chosen.where()
    total = int(database.value(f"SELECT count(*) FROM rollouts r WHERE {where}", parameters))
    num_pages = max(1, -(-total // page_size))
    page = min(max(1, page), num_pages)
    rows = database.rows(
        f"SELECT {COLUMNS} FROM rollouts r LEFT JOIN tasks t ON t.draw_id = r.draw_id WHERE {where}"
        f" ORDER BY {ORDERS[chosen.sort]} LIMIT ? OFFSET ?",
        [*parameters, page_size, (page - 1) * page_size],
    )
    return RolloutPage(rollouts=[_rollout_row(row) for row in rows], total=total, page=page, num_pages=num_pages)


def add_prompts(run_dir: RunDir, database: Database, found: RolloutPage) -> None:
    """Give each rollout of a page the end of what it was asked; one whose shard cannot be read stays without."""
    ids = [rollout.rollout_id for rollout in found.rollouts]
    places = database.rows(
        f"SELECT rollout_id, shard, offset, length FROM rollouts WHERE rollout_id IN ({','.join('?' * len(ids))})", ids
    )
    blocks = {BlockRef(row["shard"], row["offset"], row["length"]) for row in places}
    asked: dict[str, str] = {}
    for block in blocks:
        try:
            group = read_group(run_dir.rollouts, block)
        except StorageError:
            continue
        asked.update({record.rollout_id: _asked(record) for record in group.rollouts})
    for rollout in found.rollouts:
        rollout.prompt = asked.get(rollout.rollout_id, "")


def _asked(record: RolloutRecord) -> str:
    """The beginning of the last message that the rollout began with, on one line."""
    asked = record.prompt or [message for message in record.messages if message.get("role") == "user"][:1]
    text = " ".join(content_of(asked[-1])[: 3 * PROMPT_CHARS].split()) if asked else ""
    return text if len(text) <= PROMPT_CHARS else text[: PROMPT_CHARS - 3] + "..."


def steps_with_rollouts(database: Database, kind: str) -> tuple[int, int] | None:
    """The first and the last step that have rollouts of a kind."""
    row = database.row("SELECT min(step), max(step) FROM rollouts WHERE kind = ? AND step IS NOT NULL", (kind,))
    return None if row is None or row[0] is None else (row[0], row[1])


def environments_of(database: Database) -> list[str]:
    """Environments that have tasks or evaluations."""
    rows = database.rows("SELECT env_id FROM evals UNION SELECT DISTINCT env_id FROM tasks ORDER BY env_id")
    return [row[0] for row in rows]


def open_rollout(run_dir: RunDir, database: Database, rollout_id: str) -> RolloutDetail | None:
    """One rollout with its tokens; None when the ledger does not know it.

    Raises: StorageError when its shard is missing or cut short.
    """
    row = database.row(
        f"SELECT {COLUMNS}, r.shard, r.offset, r.length FROM rollouts r LEFT JOIN tasks t ON t.draw_id = r.draw_id"
        " WHERE r.rollout_id = ?",
        (rollout_id,),
    )
    if row is None:
        return None
    ref = BlockRef(row["shard"], row["offset"], row["length"])
    group = read_group(run_dir.rollouts, ref)
    record = next((r for r in group.rollouts if r.rollout_id == rollout_id), None)
    if record is None:
        return None
    opened = _rollout_row(row)
    opened.uid = opened.uid or group.draw.uid
    trained = _trained_logprobs(run_dir, database, opened, record.turns)
    return detail_of(record, opened, _siblings(database, opened), load_vocabulary(run_dir.model), trained)


def _trained_logprobs(
    run_dir: RunDir, database: Database, row: ShownRollout, turns: tuple[Turn, ...]
) -> list[FloatArray | None] | None:
    """What the trainer thought of the sampled tokens of each turn; None where the rollout's batch is not kept."""
    if row.kind != "train" or row.step is None:
        return None
    # Here, because no other page needs them and every start would wait for them.
    from mettle.orchestrator.samples import by_turn
    from mettle.storage.trained_logprobs import TrainedLogprobs

    digest = database.value("SELECT digest FROM batches WHERE step = ? AND trained_at IS NOT NULL", (row.step,))
    known = None if digest is None else TrainedLogprobs.read(run_dir.batches, digest)
    return None if known is None else by_turn(turns, known.of)


def detail_of(
    record: RolloutRecord,
    row: ShownRollout,
    siblings: list[Sibling],
    vocabulary: Vocabulary | None,
    trained: Sequence[FloatArray | None] | None = None,
) -> RolloutDetail:
    """A rollout with all that a page shows of it; `trained` is what the trainer thought of each turn's tokens."""
    return RolloutDetail(
        row=row,
        messages=[dict(message) for message in record.messages],
        turns=[
            _turn(turn, vocabulary, sampled_credit(record.credit, index, turn), trained[index] if trained else None)
            for index, turn in enumerate(record.turns)
        ],
        answer="" if record.answer is None else str(record.answer),
        info=record.info,
        usage=record.token_usage,
        timing={
            name: value
            for name, value in (("model", record.model_s), ("environment", record.env_s), ("scoring", record.scoring_s))
            if value is not None
        },
        siblings=siblings,
        is_decoded=vocabulary is not None,
    )


def _siblings(database: Database, row: ShownRollout) -> list[Sibling]:
    """The rollouts of the same task draw, or of the same task of an evaluation."""
    same = "draw_id = (SELECT draw_id FROM rollouts WHERE rollout_id = :id)"
    if row.eval_id is not None:
        same = (
            "eval_id = :eval AND coalesce(example_id, uid) ="
            " (SELECT coalesce(example_id, uid) FROM rollouts WHERE rollout_id = :id)"
        )
    rows = database.rows(
        f"SELECT rollout_id, position, reward, advantage, num_tokens, error_kind FROM rollouts WHERE {same}"
        " ORDER BY position, rowid",
        {"id": row.rollout_id, "eval": row.eval_id},
    )
    return [Sibling(**dict(found)) for found in rows]


def _rollout_row(row: sqlite3.Row) -> ShownRollout:
    values = {key: row[key] for key in ShownRollout.model_fields if key != "prompt"}
    values["metrics"] = json.loads(values["metrics"])
    return ShownRollout(**values)


def sampled_credit(credit: Credit | None, index: int, turn: Turn) -> dict[str, list[float]]:
    """What the algorithm said of the sampled tokens of turn `index`, by column; an array may begin before them, with
    what the turn adds to the prompt. An advantage without a weight has the weight 1, as in training."""
    num, found = len(turn.completion_ids), {}
    for name in (ADVANTAGES, *WEIGHTS):
        value = (credit or {}).get(name)
        entry: Any = value if value is None or isinstance(value, float) else value[index]
        if entry is not None:
            found[name] = [float(entry)] * num if isinstance(entry, float) else entry[len(entry) - num :].tolist()
    if ADVANTAGES in found:
        found.setdefault(WEIGHTS[0], [1.0] * num)
    return found


def _turn(
    turn: Turn, vocabulary: Vocabulary | None, credit: dict[str, list[float]], trained: FloatArray | None
) -> TurnDetail:
    ids: list[int] = turn.completion_ids.tolist()
    prompt: list[int] = turn.new_prompt_ids.tolist()
    weights = [credit[name] for name in WEIGHTS if name in credit]
    return TurnDetail(
        prefix_length=turn.prefix_length,
        num_prompt_tokens=len(prompt),
        temperature=turn.temperature,
        prompt_text=vocabulary.text(prompt) if vocabulary else " ".join(id_texts(prompt)),
        tokens=TokenColumns(
            ids=ids,
            texts=vocabulary.texts(ids) if vocabulary else id_texts(ids),
            logprobs=turn.logprobs.tolist(),
            versions=turn.versions.tolist(),
            advantages=credit.get(ADVANTAGES),
            is_trained=[any(row) for row in zip(*weights, strict=True)] if weights else None,
            trainer_logprobs=None if trained is None else [_finite(value) for value in trained.tolist()],
        ),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
