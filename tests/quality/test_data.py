"""Data files of every kind, what is found in them, and what is said of bad ones."""

from __future__ import annotations

import gzip
import json
import re
import threading

import pytest

from mettle.errors import UserError
from mettle.quality.checks import worst
from mettle.quality.data.columns import describe_columns, find_roles
from mettle.quality.data.files import read_file
from mettle.quality.data.formats import FORMATS, choice_index, choices_of, detect_format
from mettle.quality.data.prepared import prepare_rows
from mettle.quality.data.report import inspect_data
from mettle.quality.data.sources import Dataset, open_dataset, within
from mettle.quality.rewards.near_misses import roman

from .conftest import write_lines

ROWS = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(30)]
TABLE = "question,answer\n" + "".join(f'"{row["question"]}",{row["answer"]}\n' for row in ROWS)


def arrow_files(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.feather as feather
    import pyarrow.parquet as parquet

    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "rows.parquet")
    feather.write_feather(table, tmp_path / "rows.feather", compression="uncompressed")
    with (
        pyarrow.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS)),
        ("bom.jsonl", "\ufeff" + "".join(json.dumps(row) + "\n\n" for row in ROWS)),
        ("rows.json", json.dumps(ROWS)),
        ("wrapped.json", json.dumps({"data": ROWS})),
        ("columns.json", json.dumps({key: [row[key] for row in ROWS] for key in ROWS[0]})),
        ("lines.json", "".join(json.dumps(row) + "\n" for row in ROWS)),
        ("rows.csv", TABLE),
        ("rows.tsv", TABLE.replace(",", "\t")),
        ("rows.csv.gz", TABLE),
        ("rows.parquet", None),
        ("rows.arrow", None),
        ("rows.feather", None),
    ],
)
def test_rows_are_the_same_from_every_kind_of_file(tmp_path, name, text):
    path = tmp_path / name
    if text is None:
        arrow_files(tmp_path)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    assert read_file(path, 1000) == {"train": ROWS}
    assert read_file(path, 7) == {"train": ROWS[:7]}


def test_lines_of_text_are_rows_of_one_column(tmp_path):
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    assert read_file(tmp_path / "lines.txt", 10) == {"train": [{"text": "one"}, {"text": "two"}]}


def test_splits_come_from_an_object_and_from_a_folder(tmp_path):
    (tmp_path / "all.json").write_text(json.dumps({"train": ROWS[:5], "validation": ROWS[5:]}))
    assert {name: len(rows) for name, rows in read_file(tmp_path / "all.json", 100).items()} == {"train": 5, "eval": 25}
    folder = tmp_path / "folder"
    folder.mkdir()
    write_lines(folder / "part-train-0.jsonl", ROWS[:20])
    write_lines(folder / "test.jsonl", ROWS[20:])
    (folder / "README.md").write_text("not data")
    assert {name: len(rows) for name, rows in read_file(folder, 100).items()} == {"train": 20, "eval": 10}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "there is no file"),
        ("empty.jsonl", b"", "is empty"),
        ("blank.jsonl", b"\n\n", "holds no rows"),
        ("bad.jsonl", b'{"a": 1}\n{"a": \n', "bad.jsonl:2 is not JSON"),
        ("list.jsonl", b"[1]\n", "list.jsonl:1 is a JSON list"),
        ("scalar.json", b"3", "is no list of objects"),
        ("mixed.json", b'[{"a": 1}, 2]', "item 1 is a JSON value"),
        ("bad.csv", b"a,b\n1,2\n1,2,3\n", "bad.csv:3 has 1 more cells"),
        ("latin.csv", b"a\n\xff\xfe\n", "is not UTF-8 text: byte 2 is 0xff"),
        ("bad.parquet", b"nothing of the kind", "is no Parquet file"),
        ("bad.arrow", b"nothing of the kind", "is no Arrow file"),
        ("broken.csv.gz", b"nothing of the kind", "cannot be read"),
        ("notes.docx", b"x", "is of no kind that can be read"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        open_dataset(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_columns_are_described_with_their_types_nulls_and_extents():
    rows = [{"text": "ab", "n": 1, "tags": ["x"]}, {"text": None, "n": 2.5, "tags": []}, {"text": "abcd", "n": 3}]
    text, n, tags = describe_columns(rows)
    assert (text.types, text.num_null, text.num_distinct, text.lengths) == ({"text": 2}, 1, 2, (2, 3.0, 4))
    assert (n.types, n.range) == ({"int": 2, "float": 1}, (1.0, 3.0))
    assert (tags.types, tags.num_null) == ({"list of text": 1, "list": 1}, 1)


LETTERS = ["A", "B", "C"]
SAMPLES = {
    "gsm8k": [{"question": f"q{n}", "answer": f"so\n#### {n}"} for n in range(30)],
    "boxed": [{"problem": f"q{n}", "solution": f"\\boxed{{{n}x}}"} for n in range(30)],
    "numeric": [{"question": f"q{n}", "answer": n * 1.5} for n in range(30)],
    "boolean": [{"question": f"q{n}", "answer": n % 2 == 0} for n in range(30)],
    "multiple-choice": [{"question": f"q{n}", "choices": ["x", "y", f"z{n}"], "answer": n % 3} for n in range(30)],
    "label": [{"text": f"q{n}", "label": ["spam", "ham", "other"][n % 3]} for n in range(30)],
    "json": [{"input": f"q{n}", "output": {"n": n}} for n in range(30)],
    "date": [{"question": f"q{n}", "answer": f"2021-{n % 12 + 1:02d}-{n + 1:02d}" if n % 12 != 1 else f"2021-02-{n % 27 + 1:02d}"} for n in range(30)],
    "time": [{"question": f"q{n}", "answer": f"{n % 24:02d}:{n * 2 % 60:02d}"} for n in range(30)],
    "version": [{"question": f"q{n}", "answer": f"{n % 3}.{n}.{n % 7}"} for n in range(30)],
    "roman": [{"question": f"{n + 1} as a Roman numeral?", "answer": roman(n + 4)} for n in range(30)],
    "list": [{"question": f"Sort q{n}.", "answer": f"{n}, {n + 1}, {n + 2}"} for n in range(30)],
    "short": [{"question": f"q{n}", "answer": f"Town{chr(97 + n % 26)}{n}"} for n in range(30)],
    "free-text": [{"question": f"q{n}", "answer": f"it happened because of {n} and of {n + 1}"} for n in range(30)],
    "code": [{"text": f"q{n}", "code": f"def f(x):\n    return x + {n}", "test_list": [f"assert f(1) == {n + 1}"]} for n in range(30)],
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_each_answer_format_is_found_with_confidence_and_evidence(name):
    report = inspect_data(Dataset("made", "file", {"train": SAMPLES[name]}))
    assert report.format is not None
    assert report.format.name == name
    assert 0.75 < report.format.confidence < 1.0, "measured, never certain"
    assert any(char.isdigit() for char in report.format.evidence[0])
    assert report.recipe is not None
    compile(report.recipe.code(), "recipe", "exec")


def test_a_format_that_too_few_answers_have_is_not_taken():
    rows = SAMPLES["gsm8k"][:15] + SAMPLES["free-text"][:15]
    found = detect_format(rows, find_roles(rows))
    assert found.name == "free-text"
    assert found.confidence < 0.75
    assert "15 of 30" in found.evidence[1]


def test_choices_are_read_from_columns_lines_and_labelled_objects():
    roles = find_roles([{"question": "", "choices": [], "answerKey": ""}])
    arc = {"question": "q", "choices": {"text": ["one", "two"], "label": ["1", "2"]}, "answerKey": "2"}
    assert (choices_of(arc, roles), choice_index(arc, "2", roles)) == (["one", "two"], 1)
    lines = {"question": "Which?\nA) red\nB) blue green\nC) none"}
    assert choices_of(lines, roles) == ["red", "blue green", "none"]
    assert [choice_index(lines, answer, roles) for answer in ("b", "(C)", "blue green", "D")] == [1, 2, 1, None]


def test_a_dataset_without_answers_asks_for_the_column():
    report = inspect_data(Dataset("made", "file", {"train": [{"question": "q", "other": "x"}] * 3}))
    assert report.format is None
    assert worst(report.checks()) == "warn"
    with pytest.raises(UserError, match="no column 'reply'"):
        inspect_data(report.dataset, answer="reply")
    assert inspect_data(report.dataset, answer="other").format is not None


def test_duplicates_conflicts_and_leaks_are_counted():
    splits = {
        "train": [*ROWS, {"question": "0 +  1?", "answer": "2"}],
        "eval": [ROWS[3], {"question": "new", "answer": "1"}],
    }
    report = inspect_data(Dataset("made", "file", splits))
    assert report.overlap.num_duplicates == {"train": 1, "eval": 0}
    assert (report.overlap.num_conflicts, report.overlap.num_leaked) == (1, 1)
    assert {check.name: check.status for check in report.checks()}["no leakage"] == "fail"


def test_prepared_rows_are_whole_and_in_one_split_only():
    rows = [
        *SAMPLES["gsm8k"],
        SAMPLES["gsm8k"][0],
        {"question": "", "answer": "#### 1"},
        {"question": "x", "answer": None},
    ]
    dataset = Dataset("made", "file", {"train": rows, "eval": SAMPLES["gsm8k"][:4]})
    report = inspect_data(dataset)
    prepared = prepare_rows(dataset.splits, report.roles, report.format)
    assert {row["question"]: row["split"] for row in prepared.rows[:4]} == {f"q{n}": "eval" for n in range(4)}
    assert len(prepared.rows) == 30
    assert prepared.rows[5]["answer"] == "5"
    assert dict(prepared.left_out) == {
        "its question is there already": 5, "it has no question": 1, "it has no answer": 1,
    }  # fmt: skip


def test_the_rows_of_an_environment_are_a_dataset():
    dataset = open_dataset("env:arithmetic", split="test")
    assert (dataset.origin, list(dataset.splits)) == ("environment", ["eval"])
    assert re.fullmatch(r"\d+ [-+*] \d+", dataset.rows[0]["question"])
    with pytest.raises(UserError, match="has no split 'dev2'"):
        open_dataset("env:arithmetic", split="dev2")


def test_a_source_that_does_not_answer_is_given_up():
    never = threading.Event()
    with pytest.raises(UserError, match=r"the hub did not answer within 0\.05 s"):
        within(0.05, lambda: never.wait() and {}, "the hub")
    never.set()

    def refuses():
        raise ConnectionError("no route\nto host")

    with pytest.raises(UserError, match=r"the hub gave no dataset: ConnectionError: no route$"):
        within(1, refuses, "the hub")
