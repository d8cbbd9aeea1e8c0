"""Chats, copies, selection and files: what of a rollout becomes training data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mettle.errors import UserError
from mettle.synthesis.chats import Unusable, chats_of
from mettle.synthesis.config import Rules
from mettle.synthesis.dataset import source_of, write_dataset
from mettle.synthesis.duplicates import Seen
from mettle.synthesis.selection import select

METADATA = {
    "env_id": "words", "model": "m", "env_args": {"n": 3}, "sampling_args": {"temperature": 0.7, "n": 1, "extra_body": {}},
    "shuffle_seed": 5, "rollouts_per_example": 4, "version_info": {"env_version": "1.2.0"}, "pass_threshold": 0.5,
}  # fmt: skip


def row(task: int = 0, said: str = "yes", reward: float | None = 1.0, **other: Any) -> dict[str, Any]:
    return {
        "example_id": task,
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"question {task}"}],
        "completion": [{"role": "assistant", "content": said}],
        "reward": reward,
        "metrics": {"exact": reward},
        "error": None if reward is not None else {"error": "ModelError", "message": "gone"},
        "task_key": f"t{task}",
        "tool_defs": [],
        **other,
    }


def test_a_chat_has_calls_and_tools_in_the_form_of_the_chat_api():
    call = json.dumps({"id": "1", "name": "find", "arguments": '{"word": "a"}'})
    completion = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "A"},
        {"role": "assistant", "content": "A"},
        {"role": "tool", "tool_call_id": "2", "content": "unread"},
    ]
    tools = [{"name": "find", "description": "d", "parameters": {"type": "object"}, "strict": None}]
    [chat] = chats_of(row(completion=completion, tool_defs=tools), "keep")
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert chat.messages[2]["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"word": "a"}'}}
    ]
    assert chat.tools == [
        {"type": "function", "function": {"name": "find", "description": "d", "parameters": {"type": "object"}}}
    ]


def test_each_user_turn_is_a_chat_of_its_own():
    completion = [
        {"role": "assistant", "content": "5"}, {"role": "user", "content": "lower"},
        {"role": "assistant", "content": "3"}, {"role": "user", "content": "right"},
    ]  # fmt: skip
    chats = chats_of(row(completion=completion), "keep")
    assert [chat.messages[-1]["content"] for chat in chats] == ["5", "3"]
    assert [(chat.turn, chat.num_turns) for chat in chats] == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("<think>hm\n</think>\n\n42", "42"),
        ("hm, so it is</think>42", "42"),
        ("42 <think>and then", "42"),
        ("a <b> 42", "a <b> 42"),
    ],
)
def test_thoughts_are_stripped_whole_or_kept(said, kept):
    message = {"role": "assistant", "content": said, "reasoning_content": "secret"}
    [chat] = chats_of(row(completion=[message]), "strip")
    assert chat.messages[-1] == {"role": "assistant", "content": kept}
    [chat] = chats_of(row(completion=[message]), "keep")
    assert chat.messages[-1] == message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": "bare text", "completion": "more"}, "not a conversation"),
        ({"completion": []}, "no answer"),
        ({"completion": [{"role": "assistant", "content": "<think>only"}]}, "an empty answer"),
        ({"completion": [{"role": "assistant", "tool_calls": ["{"]}]}, "a message that cannot be read"),
        (
            {"completion": [{"role": "assistant", "tool_calls": [{"id": "1", "name": "f", "arguments": "{"}]}]},
            "a message that cannot be read",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "not text alone",
        ),
    ],
)
def test_what_no_chat_can_be_made_of_is_left_out_by_reason(changes, reason):
    with pytest.raises(Unusable, match=reason):
        chats_of(row(**changes), "strip")
    assert select([row(**changes)], Rules(min_reward=0.5, reasoning="strip")).left_out == {reason: 1}


TEXT = "first we add the two numbers then we carry the one and so the sum of both is exactly {} as was asked"


def test_copies_are_found_whatever_their_case_and_spacing_and_near_copies_by_their_runs():
    seen = Seen(0.8)
    assert seen.verdict("q", TEXT.format("seven")) is None
    assert seen.verdict(" Q ", TEXT.format("seven").upper().replace(" ", "  ")) == "copy"
    assert seen.verdict("q", TEXT.format("seven") + " thanks") == "near copy"
    assert seen.verdict("another question altogether", TEXT.format("seven")) is None
    assert seen.verdict("q", "7") is None
    assert seen.verdict("q", "8") is None, "short answers that differ say different things"
    assert Seen(1.01).verdict("q", TEXT) is None


words = st.lists(st.sampled_from(["a", "b", "c", "d", "e", "f", "g", "h"]), min_size=8, max_size=30)


@settings(max_examples=60, deadline=None)
@given(st.lists(words, min_size=2, max_size=8))
def test_no_two_kept_texts_are_near_copies_beyond_doubt_and_all_copies_are_found(texts):
    seen, kept = Seen(0.5), []
    for text in texts:
        verdict = seen.verdict("q", " ".join(text))
        if text in kept:
            assert verdict == "copy"
        elif verdict is None:
            kept.append(text)
        else:
            runs = {tuple(text[i : i + 3]) for i in range(len(text) - 2)}
            others = [{tuple(o[i : i + 3]) for i in range(len(o) - 2)} for o in kept]
            assert any(len(runs & other) / len(runs | other) >= 0.5 for other in others)


def test_the_best_of_each_task_is_kept_and_every_other_rollout_is_counted_once():
    rows = [
        row(0, "a", 0.6), row(0, "b", 0.9), row(0, "c", 0.2), row(0, "d", None),
        row(1, "x", 1.0, is_truncated=True), row(1, "y", 1.0), row(2, "z", 0.1),
    ]  # fmt: skip
    selection = select(rows, Rules(min_reward=0.5, held_out=0.0))
    assert [(kept.task, kept.chats[-1].messages[-1]["content"]) for kept in selection.train] == [
        ("t0", "b"),
        ("t1", "y"),
    ]
    assert selection.left_out == {
        "not among the best of its task": 1, "reward below the threshold": 2, "failed": 1, "cut off": 1,
    }  # fmt: skip
    assert selection.num_rollouts == len(rows) == len(selection.train) + sum(selection.left_out.values())


rollouts = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(["a", "b", "c"]), st.none() | st.floats(0, 1)), max_size=40
)


@settings(max_examples=60, deadline=None)
@given(rollouts, st.randoms(use_true_random=False), st.integers(1, 3))
def test_the_order_in_which_rollouts_end_changes_nothing_that_is_kept(found, shuffler, best):
    rules = Rules(min_reward=0.3, best=best, held_out=0.5)
    rows = [row(task, said, reward) for task, said, reward in found]

    def kept(selection: Any) -> tuple[Any, ...]:
        sides = (selection.train, selection.held_out)
        return tuple(
            sorted((each.task, each.row["completion"][0]["content"], each.row["reward"]) for each in side)
            for side in sides
        )

    first = select(rows, rules)
    shuffled = list(rows)
    shuffler.shuffle(shuffled)
    assert kept(select(shuffled, rules)) == kept(first)
    assert not {each.task for each in first.train} & {each.task for each in first.held_out}


def test_a_task_stays_on_its_side_when_more_is_generated():
    rules = Rules(min_reward=0.5, held_out=0.3)
    few = select([row(task) for task in range(50)], rules)
    many = select([row(task) for task in range(200)], rules)
    assert {each.task for each in few.held_out} <= {each.task for each in many.held_out}
    assert 0.2 < len(many.held_out) / 200 < 0.4


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
