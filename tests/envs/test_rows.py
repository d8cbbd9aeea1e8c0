"""Datasets in every shape that authors give, and the methods of Hugging Face datasets that they call."""

from __future__ import annotations

import pytest

import mettle.envs as vf
from mettle.envs.rows import Rows, rows_source
from mettle.errors import UserError

LIST = [{"question": f"q{i}", "answer": str(i), "n": i % 2} for i in range(4)]


@pytest.fixture
def rows() -> Rows:
    return Rows.from_list(LIST)


def test_a_hugging_face_dataset_a_dict_of_splits_a_stream_and_a_frame_are_datasets():
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(LIST)
    shapes = [
        whole,
        datasets.DatasetDict({"train": whole, "test": whole.select([0])}),
        datasets.DatasetDict({"validation": whole}),
        whole.to_iterable_dataset(),
        whole.to_pandas(),
        iter(LIST),
        {"question": [row["question"] for row in LIST], "answer": [row["answer"] for row in LIST]},
    ]
    for shape in shapes:
        env = vf.SingleTurnEnv(dataset=shape)
        assert [row["answer"] for row in env.get_dataset()] == ["0", "1", "2", "3"]
        assert env.get_dataset()[0]["prompt"][0]["content"] == "q0"


def test_splits_without_a_train_split_have_to_be_chosen():
    with pytest.raises(UserError, match="test', 'validation"):
        rows_source({"test": LIST, "validation": LIST})


@pytest.mark.parametrize("source", ["gsm8k", 3])
def test_what_holds_no_rows_is_no_dataset(source):
    with pytest.raises(UserError, match="a dataset is a list of rows"):
        rows_source(source)


def test_rows_are_selected_sorted_split_and_renamed(rows):
    assert [row["answer"] for row in rows.select([2, 0])] == ["2", "0"]
    assert [row["answer"] for row in rows.skip(3)] == ["3"]
    assert [row["answer"] for row in rows.sort("answer", reverse=True)] == ["3", "2", "1", "0"]
    assert len(rows.filter(lambda row, index: index > 1, with_indices=True)) == 2
    parts = rows.train_test_split(test_size=0.25, seed=1)
    assert (len(parts["train"]), len(parts["test"])) == (3, 1)
    assert {row["answer"] for part in parts.values() for row in part} == {"0", "1", "2", "3"}
    assert rows.rename_column("answer", "gold").column_names == ["question", "gold", "n"]
    assert rows.remove_columns(["n"]).column_names == ["question", "answer"]
    assert rows.select_columns("n")[0] == {"n": 0}
    assert rows.add_column("id", [7, 8, 9, 10])[1]["id"] == 8
    assert rows.unique("n") == [0, 1]
    assert rows.num_rows == 4
    assert rows.features["n"] is int
    assert rows.to_dict()["n"] == [0, 1, 0, 1]


def test_rows_are_mapped_with_indices_arguments_and_in_one_batch(rows):
    mapped = rows.map(
        lambda row, index, by: {"gold": row["n"] + index * by},
        with_indices=True,
        fn_kwargs={"by": 10},
        remove_columns=["n", "question"],
        num_proc=4,
    )
    assert mapped.column_names == ["answer", "gold"]
    assert mapped["gold"] == [0, 11, 20, 31]
    batched = rows.map(lambda columns: {"n": [value + 1 for value in columns["n"]]}, batched=True)
    assert batched["n"] == [1, 2, 1, 2]
