"""Files of training data, in which each row says where it came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.synthesis.conftest import row

from mettle.errors import UserError
from mettle.synthesis.config import Rules
from mettle.synthesis.dataset import source_of, write_dataset
from mettle.synthesis.selection import select

METADATA = {
    "env_id": "words", "model": "m", "env_args": {"n": 3}, "sampling_args": {"temperature": 0.7, "n": 1, "extra_body": {}},
    "shuffle_seed": 5, "rollouts_per_example": 4, "version_info": {"env_version": "1.2.0"}, "pass_threshold": 0.5,
}  # fmt: skip


def _read(path: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_row_says_where_it_came_from(tmp_path):
    selection = select([row(task) for task in range(10)], Rules(min_reward=0.5, held_out=0.3))
    rules = Rules(min_reward=0.5, held_out=0.3)
    written = write_dataset(tmp_path, selection, source_of(METADATA), rules, ["jsonl"], created_at=0.0)
    lines = _read(tmp_path / "train.jsonl")
    assert set(lines[0]) == {"messages", "tools", "provenance"}
    provenance = lines[0]["provenance"]
    assert provenance["environment"] == "words@1.2.0"
    assert provenance["model"] == "m"
    assert provenance["sampling"] == {"temperature": 0.7}
    assert (provenance["seed"], provenance["reward"], provenance["created_at"]) == (5, 1.0, "1970-01-01T00:00:00Z")
    assert provenance["task"].startswith("t")
    assert written.summary["train"]["chats"] + written.summary["held_out"]["chats"] == 10
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(written.summary))


def test_parquet_holds_the_same(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    selection = select([row(task) for task in range(10)], Rules(min_reward=0.5, held_out=0.0))
    write_dataset(tmp_path, selection, source_of(METADATA), Rules(min_reward=0.5), ["jsonl", "parquet"])
    table = pq.read_table(tmp_path / "train.parquet").to_pylist()
    lines = _read(tmp_path / "train.jsonl")
    assert [[m["content"] for m in found["messages"]] for found in table] == [
        [m["content"] for m in line["messages"]] for line in lines
    ]
    assert json.loads(table[0]["provenance"]) == lines[0]["provenance"]


def test_a_set_of_nothing_is_refused_with_the_reasons(tmp_path):
    selection = select([row(0, reward=0.1), row(1, reward=None)], Rules(min_reward=0.5))
    with pytest.raises(UserError, match="none of 2 rollouts was kept: 1 reward below the threshold; 1 failed"):
        write_dataset(tmp_path, selection, source_of(METADATA), Rules(min_reward=0.5), ["jsonl"])
