"""Logs of Inspect as evaluations: a real one (`inspect_log_made.py`), its other forms, and files that are none."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.errors import UserError
from mettle.evals import inspect_log
from mettle.evals.imported import import_inspect_log
from mettle.evals.inspect_log import InspectLog
from mettle.evals.inspect_rows import inspect_metadata, inspect_row, reward_scorer
from mettle.evals.reader import EvaluationReader

LOG = Path(__file__).parent / "data" / "sums.eval"


@pytest.fixture(scope="module")
def parts():
    """(header, samples) of the real log."""
    log = InspectLog(LOG)
    samples = list(log.samples())
    log.close()
    return log.header, samples


def archive(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, value in files.items():
            made.writestr(name, value if isinstance(value, str | bytes) else json.dumps(value))
    return path


def rows_of(path):
    return list(EvaluationReader(path).rows())


def test_a_log_is_an_evaluation_with_its_messages_scores_tokens_and_errors(tmp_path):
    done = import_inspect_log(LOG, tmp_path)
    assert (done.num_rollouts, done.scorer, done.status) == (6, "includes", "success")
    reader = EvaluationReader(done.path)
    rows = {(row["example_id"], row["info"]["epoch"]): row for row in reader.rows()}
    one, two, three = (rows[name, 2] for name in ("one", "two", "three"))
    assert [m["role"] for m in one["prompt"] + one["completion"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    call = json.loads(one["completion"][0]["tool_calls"][0])
    assert (call["name"], call["arguments"]) == ("add", {"x": 1, "y": 1})
    assert one["completion"][1]["tool_call_id"] == call["id"]
    assert one["completion"][2]["reasoning_content"] == "one and one"
    assert one["token_usage"] == {"input_tokens": 46.0, "output_tokens": 14.0}
    assert one["metrics"] == {"includes": 1.0, "style.short": 1.0, "style.polite": 0.5}
    assert one["info"]["scores"]["style"]["explanation"] == "by length"
    assert [tool["name"] for tool in one["tool_defs"]] == ["add"]
    assert (two["reward"], two["answer"], two["info"]["metadata"]) == (0.0, "5", {"level": 2})
    assert two["completion"][0]["content"].startswith("It is 2. Longer than what a log keeps")
    assert three["reward"] is None
    assert (three["error"]["error"], three["error"]["message"]) == ("ValueError", "a <b>broken</b> sample")
    entry = reader.entry
    assert (entry.env_id, entry.model, entry.num_planned) == ("sums", "mockllm/model", 6)
    assert entry.error_rate == pytest.approx(2 / 6)


def test_the_mean_is_the_one_that_inspect_worked_out(tmp_path, parts):
    header, _ = parts
    own = {each["name"]: each["metrics"] for each in header["results"]["scores"]}
    stats = EvaluationReader(import_inspect_log(LOG, tmp_path).path).stats()
    assert stats["reward"].mean == own["includes"]["accuracy"]["value"]
    assert stats["metrics"]["style.short"].mean == own["short"]["mean"]["value"]


def test_every_form_of_a_log_says_the_same_and_the_same_log_again_replaces_what_it_left(tmp_path, parts):
    header, samples = parts
    document = tmp_path / "sums.json"
    document.write_text(json.dumps({**header, "samples": samples}))
    files = {f"samples/{s['id']}_epoch_{s['epoch']}.json": s for s in samples}
    deflated = archive(tmp_path / "sums.eval", {"header.json": header, **files})
    found = [import_inspect_log(path, tmp_path / "evals").path for path in (LOG, document, deflated)]
    assert len(set(found)) == 1
    rows = [rows_of(import_inspect_log(p, tmp_path / str(i)).path) for i, p in enumerate((LOG, document, deflated))]
    assert rows[0] == rows[1] == rows[2]


def test_a_log_of_an_evaluation_that_was_killed_has_what_had_ended(tmp_path, parts):
    header, samples = parts
    start = {"version": 2, "eval": header["eval"], "plan": header["plan"]}
    log = archive(tmp_path / "half.eval", {"_journal/start.json": start, "samples/one_epoch_1.json": samples[0]})
    done = import_inspect_log(log, tmp_path / "evals")
    assert (done.num_rollouts, done.scorer, done.status) == (1, "includes", "unknown")
    assert rows_of(done.path)[0]["reward"] == 1.0


def test_another_score_is_the_reward_when_it_is_named(tmp_path, parts):
    done = import_inspect_log(LOG, tmp_path, "style.polite")
    assert {row["reward"] for row in rows_of(done.path)} == {0.5, None}
    with pytest.raises(UserError, match=r"no score 'none'; it has includes, style.short, style.polite"):
        import_inspect_log(LOG, tmp_path, "none")
    header = {name: value for name, value in parts[0].items() if name != "results"}
    document = tmp_path / "x.json"
    document.write_text(json.dumps({**header, "eval": {**header["eval"], "scorers": None}, "samples": parts[1]}))
    with pytest.raises(UserError, match=r"--score takes includes, style\.polite, style\.short"):
        import_inspect_log(document, tmp_path)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("C", 1.0), ("I", 0.0), ("P", 0.5), ("N", 0.0), (True, 1.0), ("0.25", 0.25), (float("nan"), None), ("free", None),
     ({"x": 1}, None), (10**400, None), (None, None)],
)  # fmt: skip
def test_a_score_is_a_number_where_it_means_one(value, wanted):
    row = inspect_row({"id": 1, "scores": {"s": {"value": value}}, "messages": []}, "s", "m")
    assert row["reward"] == wanted


def test_what_stopped_a_sample_and_hid_its_thoughts_is_said():
    hidden = {"type": "reasoning", "reasoning": "secret", "redacted": True, "summary": "it thought"}
    image = {"type": "image", "image": "data:image/png;base64,AA=="}
    said = [{"role": "assistant", "content": [hidden, image]}]
    cut = {"choices": [{"stop_reason": "max_tokens"}]}
    row = inspect_row({"id": 1, "input": "x", "messages": said, "output": cut}, "s", "m")
    assert (row["is_truncated"], row["stop_condition"]) == (True, "max_tokens")
    assert row["completion"][0]["reasoning_content"] == "it thought"
    assert row["completion"][0]["content"] == [{"type": "image_url", "image_url": {"url": image["image"]}}]
    limited = inspect_row({"id": 1, "messages": said, "limit": {"type": "token", "limit": 9}}, "s", "m")
    assert (limited["is_truncated"], limited["stop_condition"]) == (True, "limit: token")


def test_tokens_of_a_judge_are_not_the_models():
    usage = {"m": {"input_tokens": 1, "output_tokens": 2}, "judge": {"input_tokens": 100, "output_tokens": 100}}
    row = inspect_row({"id": 1, "model_usage": usage}, "s", "m")
    assert row["token_usage"] == {"input_tokens": 1.0, "output_tokens": 2.0}


def bent(name):
    """The real log with the bytes of a part changed."""
    data = bytearray(LOG.read_bytes())
    with zipfile.ZipFile(LOG) as log:
        entry = log.getinfo(name)
    place = entry.header_offset + entry.compress_size // 2
    data[place] ^= 0xFF
    return bytes(data)


def test_what_is_no_log_is_refused_and_leaves_nothing(tmp_path, parts, monkeypatch):
    header, samples = parts
    deep = json.dumps(header)[:-1] + ', "samples": [' + "[" * 5000 + "]" * 5000 + "]}"
    broken = {
        "text.eval": b"not a log", "list.json": b"[]", "no.json": b"{}", "nothing.json": json.dumps(header).encode(),
        "number.json": json.dumps({**header, "samples": [3]}).encode(), "deep.json": deep.encode(),
        "bent.eval": bent("samples/one_epoch_1.json"), "cut.eval": LOG.read_bytes()[:-30],
    }  # fmt: skip
    for name, data in broken.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError):
            import_inspect_log(tmp_path / name, tmp_path / "evals")
    archive(tmp_path / "headless.eval", {"samples/x.json": samples[0]})
    with pytest.raises(UserError, match="no header"):
        import_inspect_log(tmp_path / "headless.eval", tmp_path / "evals")
    monkeypatch.setattr(inspect_log, "MAX_SAMPLE_BYTES", 4000)
    bomb = archive(tmp_path / "bomb.eval", {"header.json": header, "samples/x.json": " " * 100_000})
    for log in (LOG, bomb):
        with pytest.raises(UserError, match="is larger than"):
            import_inspect_log(log, tmp_path / "evals")
    assert not list((tmp_path / "evals").rglob("*.json*"))


def test_names_of_a_log_lead_nowhere(tmp_path, parts):
    header, samples = parts
    told = {**header["eval"], "task": "../../x\0y", "model": "/etc/passwd"}
    log = archive(tmp_path / "x.eval", {"header.json": {**header, "eval": told}, "samples/../../y.json": samples[0]})
    done = import_inspect_log(log, tmp_path / "evals")
    assert done.path.resolve().parent.parent == (tmp_path / "evals").resolve()


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = (
    "id", "epoch", "input", "target", "messages", "output", "scores", "metadata", "events", "model_usage", "error",
    "attachments", "limit", "total_time", "score",
)  # fmt: skip


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, anything)), anything)
def test_whatever_a_sample_holds_is_a_row_or_a_word_about_it(sample, header):
    row = inspect_row(sample, "s", "m")
    assert json.loads(json.dumps(row, default=str)) is not None
    told = header if isinstance(header, dict) else {"eval": header, "results": header}
    inspect_metadata(told, reward_scorer(told))
