"""A damaged evaluation is a line about that evaluation: no reader crashes on it, and no list is without the others."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mettle.envs as vf
from mettle.cli import main
from mettle.errors import MettleError
from mettle.evals.entries import list_evaluations
from mettle.evals.reader import EvaluationReader
from mettle.hub.evaluations import EvaluationCatalog, EvaluationFilter, card_of, find_rollouts, open_rollout
from mettle.tui.overview import headline, overview
from mettle.tui.search import texts_of

METADATA = {
    "env_id": "toy", "model": "m", "env_args": {"hard": True}, "base_url": "http://x/v1", "num_examples": 2,
    "rollouts_per_example": 2, "sampling_args": {"temperature": 0.7}, "date": "2026-01-01", "time": 3.5,
    "time_ms": 3500.0, "avg_reward": 0.5, "avg_error": 0.0, "avg_metrics": {"right": 0.5}, "pass_threshold": 0.5,
    "pass_at_k": {"1": 0.5}, "version_info": {"env_version": "0.1.0"}, "state_columns": ["turns"], "tools": [],
    "usage": {"input_tokens": 10.0}, "cost": {"input_usd": 0.1, "output_usd": 0.2, "total_usd": 0.3},
    "stats": {"num_rollouts": 4, "reward": {"mean": 0.5, "interval": [0.1, 0.9]}}, "shuffle": False,
    "launch": {"env_id": "toy", "model": "m"},
}  # fmt: skip
CALL = json.dumps({"id": "c", "name": "f", "arguments": "{}"})


def row(task: int, reward: float) -> dict[str, Any]:
    assistant = {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [CALL]}
    return {
        "example_id": task, "prompt": [{"role": "user", "content": f"q{task}"}], "completion": [assistant],
        "answer": "1", "info": {"k": 1}, "reward": reward, "metrics": {"right": reward}, "right": reward,
        "error": None, "timing": {"total": 2.0, "model": {"spans": [], "duration": 1.5}}, "is_completed": True,
        "is_truncated": False, "stop_condition": "done", "token_usage": {"input_tokens": 10.0, "output_tokens": 3.0},
        "tool_defs": [{"name": "f", "description": "d", "parameters": {}}], "task_key": f"k{task}",
    }  # fmt: skip


ROWS = [row(task, reward) for task in (0, 1) for reward in (0.0, 1.0)]
ODD = st.sampled_from(
    [None, True, {}, [], "", "x", "\ud800", -1, 0, 10**30, 1e308, math.nan, math.inf, [None], [[]], {"": {}}, ["x", 1],
     {"mean": "x"}, {"total_usd": {}}, {"duration": []}, {"error": []}, {"role": {}}, [{"role": []}], [{"content": 1}]]
)  # fmt: skip


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in items:
        yield (*path, key)
        yield from paths_in(inside, (*path, key))


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, bytes | None]:
    """The two files, some of their values odd or gone, their bytes cut, or a file gone or no file at all."""
    metadata, rows = json.loads(json.dumps(METADATA)), json.loads(json.dumps(ROWS))
    for _ in range(draw(st.integers(0, 4))):
        whole = draw(st.sampled_from([metadata, rows]))
        *inner, last = draw(st.sampled_from(list(paths_in(whole))))
        place = whole
        for key in inner:
            place = place[key]
        if draw(st.booleans()):
            place[last] = copy.deepcopy(draw(ODD))  # which may be changed in turn
        else:
            del place[last]
    files = {
        "metadata.json": json.dumps(metadata).encode(),
        "results.jsonl": b"".join(json.dumps(each).encode() + b"\n" for each in rows),
    }
    for name in draw(st.sets(st.sampled_from(sorted(files)))):
        data = files[name]
        at = draw(st.integers(0, len(data)))
        kinds = [data[:at], data[:at] + draw(st.binary(max_size=8)) + data[at:], b"", b"[" * 20_000, b"null", None]
        files[name] = draw(st.sampled_from(kinds))
    return files


@contextlib.contextmanager
def workspace(files: dict[str, bytes | None]) -> Iterator[tuple[Path, Path]]:
    """A folder with a good and a damaged evaluation, which is the current one for a while."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "outputs" / "evals" / "toy--m"
        good, bad = base / "good", base / "bad"
        good.mkdir(parents=True)
        bad.mkdir()
        (good / "metadata.json").write_text(json.dumps(METADATA))
        (good / "results.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ROWS))
        for name, data in files.items():
            (bad / name).write_bytes(data) if data is not None else (bad / name).mkdir()
        os.chdir(folder)
        try:
            yield good.relative_to(folder), bad.relative_to(folder)
        finally:
            os.chdir(before)


def mettle(*words: object) -> tuple[int, str, str]:
    """A command: its exit code, and what it printed and complained of."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.run([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


def read_everything(bad: Path) -> None:
    """Every reader over one evaluation. Raises: what only a mistake in Mettle could."""
    for entry in list_evaluations():
        assert entry.time_s is None or entry.time_s >= -1e15
        assert card_of("a", entry).model_dump_json()
    with contextlib.suppress(MettleError):
        reader = EvaluationReader(bad)
        stats = reader.stats()
        headline(reader, stats)
        overview(reader, stats, 80)
        for line in reader.rows():
            list(texts_of(line))
        list(reader.search("a"))
    with contextlib.suppress(MettleError):
        catalog = EvaluationCatalog(Path(), dict)
        opened = catalog.open("toy--m~bad")
        shown = find_rollouts(opened, EvaluationFilter(words="a", sort="task"), 1)
        for rollout in shown.rollouts:
            open_rollout(opened, rollout.index)


COMMANDS: list[tuple[Any, ...]] = [
    ("eval", "view", "--plain"),
    ("eval", "list", "--json"),
    ("eval", "view", "BAD", "--plain"),
    ("eval", "view", "BAD", "--json"),
    ("eval", "view", "BAD", "-i", "0", "--plain"),
    ("eval", "compare", "GOOD", "BAD"),
    ("eval", "compare", "BAD", "GOOD", "--json"),
    ("eval", "check", "BAD"),
    ("eval", "export", "BAD", "-o", "out.html"),
    ("eval", "export", "BAD", "-o", "out.csv"),
    ("eval", "export", "BAD", "-o", "out.jsonl"),
    ("data", "generate", "--from", "BAD", "--dir", "made"),
]


@settings(max_examples=40)
@given(files=damaged(), commands=st.lists(st.sampled_from(COMMANDS), min_size=2, max_size=2, unique=True))
def test_no_command_crashes_and_no_list_is_without_the_others(
    files: dict[str, bytes | None], commands: list[tuple[Any, ...]]
) -> None:
    """Each example with two of the commands; in the nightly tier with all."""
    check_commands(files, commands)


@pytest.mark.nightly
@settings(max_examples=200)
@given(files=damaged())
def test_no_command_of_all_crashes(files: dict[str, bytes | None]) -> None:
    check_commands(files, COMMANDS)


def check_commands(files: dict[str, bytes | None], commands: list[tuple[Any, ...]]) -> None:
    with workspace(files) as (good, bad):
        read_everything(bad)
        for command in commands:
            words = [{"GOOD": good, "BAD": bad}.get(word, word) for word in command]
            code, out, err = mettle(*words)
            assert "a mistake in Mettle" not in err, (command, err)
            assert code in (0, 1, 2, 3), (command, code, err)
            assert code == 0 or err.count("\n") == 1 or command[1] == "check", (command, err)
            if command[1] in ("view", "list") and "BAD" not in command:
                assert code == 0, err
                assert "good" in out


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("time", {}, "time is {} and no number"),
        ("stats", {"reward": {"mean": "x"}}, "stats.reward is {'mean': 'x'} and no figures"),
        ("sampling_args", "hot", "sampling_args is 'hot' and no table"),
        ("rollouts_per_example", -4, "rollouts_per_example is -4 and no count"),
    ],
)
def test_a_field_without_meaning_is_one_line_about_its_file(field: str, value: Any, told: str) -> None:
    files = {
        "metadata.json": json.dumps({**METADATA, field: value}).encode(),
        "results.jsonl": b"".join(json.dumps(each).encode() + b"\n" for each in ROWS),
    }
    with workspace(files) as (good, bad):
        for words in (("eval", "view", "--plain"), ("eval", "view", bad, "--plain")):
            code, out, err = mettle(*words)
            assert code == 0
            assert err == f"note: {bad}/metadata.json: {told}; passed over\n"
        assert str(good) in mettle("eval", "view", "--plain")[1] or "good" in out


def test_a_number_beyond_all_reckoning_is_none() -> None:
    """Its square is more than a float can hold, so no variance can be made of it."""
    rows = [*ROWS[:3], {**ROWS[3], "reward": 1e308}]
    files = {
        "metadata.json": json.dumps(METADATA).encode(),
        "results.jsonl": b"".join(json.dumps(each).encode() + b"\n" for each in rows),
    }
    with workspace(files) as (_, bad):
        read_everything(bad)
        assert "1 of 4 failed: no reward 1" in mettle("eval", "check", bad)[1]


@settings(max_examples=15)
@given(files=damaged())
def test_going_on_with_a_damaged_evaluation_runs_or_says_why_not(files: dict[str, bytes | None]) -> None:
    class Answers(vf.Client):
        async def get_response(self, prompt, model, sampling_args=None, tools=None, **_):
            message = vf.ResponseMessage(content="1", finish_reason="stop", is_truncated=False)
            return vf.Response(id="", created=0, model=model, usage=None, message=message)

    rows = [{"question": f"q{task}", "answer": "1", "info": {"k": 1}} for task in (0, 1)]
    with workspace(files) as (good, bad):
        shutil.rmtree(good)
        env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([lambda completion: 1.0]), env_id="toy")
        with contextlib.suppress(MettleError):
            results = asyncio.run(env.evaluate(Answers(), "m", rollouts_per_example=2, results_path=bad))
            assert len(results["outputs"]) == 4
