"""Evaluations on the pages: their own, those of a run, unfinished and imported ones; the same numbers in every view."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from mettle.cli import main
from mettle.evals.entries import list_evaluations
from mettle.evals.estimator import mean_over_tasks
from mettle.evals.reader import EvaluationReader
from mettle.evals.report import plain
from mettle.hub.app import create_app
from mettle.records.tasks import GroupRecord, RolloutRecord, TaskDraw
from mettle.storage.evals import EvalPlan, EvalStore
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.shards import ShardWriter
from mettle.tui.opened import OpenRun
from mettle.tui.overview import overview
from mettle.wording import format_interval, format_reward

REWARDS = [[1.0, 0.0, 1.0], [0.25, None, 0.25], [0.0, 0.0, 0.0], [1.0, 1.0, 0.5]]
HOSTILE = "<script>alert(1)</script> \x1b[2J"


def rollout_of(task, place, reward, **fields):
    messages = [
        {"role": "user", "content": f"question {task}"},
        {"role": "assistant", "content": f"answer {task}{place} {HOSTILE}"},
    ]
    failed = (
        {"error_kind": "provider", "error_type": "ModelError", "error": "connection reset"} if reward is None else {}
    )
    metrics = {} if reward is None else {"right": float(reward > 0.5), "num_turns": 1.0}
    record = RolloutRecord(
        f"r{task}-{place}", reward, metrics, messages, stop_condition="max_turns_reached", duration_s=2.0,
        answer=f"{task * 7}", example_id=task, uid=f"word-{task}", position=place, num_prompt_messages=1,
        model_s=1.5, token_usage={"input_tokens": 10.0, "output_tokens": 5.0 + place}, **failed,
    )  # fmt: skip
    return replace(record, **fields)


def write_evaluation(folder, rewards=REWARDS, *, is_finished=True, planned=None, env="words"):
    """An evaluation as `eval run` leaves it in the store."""
    store_dir = RunDir(folder)
    ledger = Ledger(store_dir.ledger)
    shards = ShardWriter(store_dir.rollouts)
    store = EvalStore(ledger.database, shards)
    each = max(map(len, rewards), default=1)
    about = {
        "env_id": env,
        "model": "m",
        "num_examples": len(rewards),
        "rollouts_per_example": each,
        "launch": {"k": 1},
    }
    planned = sum(map(len, rewards)) if planned is None else planned
    eval_id = store.begin(EvalPlan("eval", env, len(rewards), planned, 0, "m", about))
    groups = [
        GroupRecord(
            TaskDraw(-1, env, f"word-{task}", 0, task), 0,
            tuple(rollout_of(task, place, reward) for place, reward in enumerate(values)),
        )
        for task, values in enumerate(rewards)
    ]  # fmt: skip
    store.add(eval_id, groups)
    if is_finished:
        found = mean_over_tasks([group.rewards for group in groups])
        store.end(eval_id, mean=found.mean, interval=found.interval, metadata={**about, "time": 6.0})
    ledger.close()
    return folder


@pytest.fixture
def workspace(tmp_path, monkeypatch, run_writer):
    """A run with two evaluations, a finished evaluation, one that runs, and an imported one."""
    monkeypatch.chdir(tmp_path)
    write_evaluation(tmp_path / "outputs/evals/words--m/aaaa0001")
    write_evaluation(tmp_path / "outputs/evals/words--m/aaaa0002", REWARDS[:2], is_finished=False, planned=16_000)
    imported = tmp_path / "outputs/evals/gsm8k--x/bbbb0001"
    imported.mkdir(parents=True)
    (imported / "metadata.json").write_text('{"env_id": "gsm8k", "model": "x", "avg_reward": 0.5}')
    row = {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}
    rows = [{**row, "example_id": i, "reward": float(i), "error": None, "metrics": {}} for i in (0, 1)]
    (imported / "results.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    writer = run_writer(tmp_path / "runs/mine", steps=2, groups=2)
    writer.train_step(1)
    writer.finish()
    writer.ledger.close()
    return tmp_path


@pytest.fixture
def client(workspace):
    app = create_app(workspace / "runs", workspace=workspace)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost:7860")


async def text(client, path, status=200):
    answer = await client.get(path)
    assert answer.status_code == status, answer.text[:500]
    return answer.text


OWN = "/evaluations/words--m~aaaa0001"
PAGES = [
    "/", OWN, f"{OWN}/rollouts", f"{OWN}/rollouts/0", f"{OWN}/rollouts/4", "/evaluations/words--m~aaaa0002",
    "/evaluations/gsm8k--x~bbbb0001", "/evaluations/gsm8k--x~bbbb0001/rollouts/1", "/runs/mine/evals",
    "/runs/mine/evals/1", "/runs/mine/evals/3/rollouts", "/runs/mine/evals/3/rollouts/3",
]  # fmt: skip


async def test_every_page_of_an_evaluation_is_a_whole_page(client):
    for path in PAGES:
        page = await text(client, path)
        assert page.startswith("<!doctype html>"), path
        assert page.rstrip().endswith("</html>"), path
        assert len(re.findall("<h1", page)) == 1, path
        assert "None" not in page, path
        assert "<script>alert" not in page, path
        assert not re.search(r"\son\w+=|<style|style=", page), f"{path}: the security policy lets none of this run"


async def test_evaluations_are_listed_beside_runs_and_say_how_much_is_there(client):
    page = await text(client, "/")
    assert page.index("/runs/mine") < page.index(OWN)
    assert re.search(r'6<span class="muted"> of 16,000</span>', page)
    cards = {card["name"]: card for card in (await client.get("/api/v1/evaluations")).json()["evaluations"]}
    assert set(cards) == {"words--m~aaaa0001", "words--m~aaaa0002", "gsm8k--x~bbbb0001"}
    assert cards["words--m~aaaa0002"]["state"] == "running"
    assert (cards["words--m~aaaa0002"]["num_rollouts"], cards["words--m~aaaa0002"]["planned_rollouts"]) == (6, 16_000)
    page = await text(client, "/evaluations/words--m~aaaa0002")
    assert "6 of 16,000 rollouts" in page
    assert 'hx-trigger="every 3s"' in page


async def test_a_page_follows_an_evaluation_that_goes_on(client, workspace):
    path = "/evaluations/words--m~aaaa0002"
    before = await text(client, path)
    store_dir = RunDir(workspace / "outputs/evals/words--m/aaaa0002")
    ledger = Ledger(store_dir.ledger)
    store = EvalStore(ledger.database, ShardWriter(store_dir.rollouts))
    store.begin(EvalPlan("eval", "words", 4, 16_000, 0, "m", {"env_id": "words", "time": 0.008}), 1)
    cards = (await client.get("/api/v1/evaluations")).json()["evaluations"]
    assert [card["duration_s"] for card in cards if card["state"] == "running"] == [None], (
        "not what it had at its start"
    )
    store.add(1, [GroupRecord(TaskDraw(-1, "words", "word-9", 0, 9), 0, (rollout_of(9, 0, 1.0),))])
    after = await text(client, path)
    store.end(1, state="interrupted")
    ledger.close()
    assert ("6 of 16,000" in before, "7 of 16,000" in after) == (True, True)
    stopped = await text(client, path)
    assert "interrupted" in stopped
    assert "--resume" in stopped
    assert "hx-trigger" not in stopped


async def test_rollouts_are_found_by_words_task_cause_and_reward(client):
    async def indexes(query):
        found = (await client.get(f"/api/v1{OWN}/rollouts?{query}")).json()
        return [rollout["index"] for rollout in found["rollouts"]]

    assert len(await indexes("")) == 12
    assert await indexes("words=question answer 10") == [3], "all of the words, in any order"
    assert await indexes("words=ANSWER 21") == [7, 9, 10, 11], "what was said, and what was expected"
    assert await indexes("words=connection") == await indexes("errors=true") == await indexes("cause=provider") == [4]
    assert await indexes("task=2&sort=newest") == [8, 7, 6]
    assert await indexes("min_reward=0.3&max_reward=0.6") == [11]
    assert (await indexes("sort=-reward"))[:2] == [0, 2]
    assert (await indexes("sort=reward"))[-1] == 4, "one that failed has no reward and stands last"
    assert await indexes("words=nowhere") == []
    assert "No rollout matches" in await text(client, f"{OWN}/rollouts?words=nowhere")
    assert "min_reward is a number" in await text(client, f"{OWN}/rollouts?min_reward=much", 422)
    assert (await client.get(f"/api/v1{OWN}/rollouts?sort=odd")).status_code == 422


async def test_a_rollout_shows_what_was_said_and_why_it_scored(client):
    page = html.unescape(await text(client, f"{OWN}/rollouts/1"))
    for words in ("question 0", "answer 01", "0.000", "right", "Expected", "max turns reached", "#2", "output tokens"):
        assert words in page, words
    failed = await text(client, f"{OWN}/rollouts/4")
    assert "Failed at the provider" in failed
    assert "connection reset" in failed
    assert f'href="{OWN}/rollouts/3"' in failed, "its siblings"
    assert (await client.get(f"/api/v1{OWN}/rollouts/99")).status_code == 404


async def test_probes_of_a_warm_up_are_no_held_out_evaluations(client, workspace, capsys):
    ledger = Ledger(RunDir(workspace / "runs/mine").ledger)
    store = EvalStore(ledger.database, ShardWriter(RunDir(workspace / "runs/mine").rollouts))
    store.end(store.begin(EvalPlan("probe", "words", 4, 4, model="policy", metadata={"env_id": "words"})), mean=0.01)
    ledger.close()
    assert [e["mean"] for e in (await client.get("/api/v1/runs/mine/evals")).json()["evals"] if e["mean"] < 0.02] == []
    page = html.unescape(re.sub("<[^>]+>", "", await text(client, "/runs/mine/evals")))
    assert "probe of the warm-up, no. 4" in page
    assert "mettle eval compare mine:baseline mine:final" in page
    assert main.run(["eval", "list", "mine"]) == 0
    assert " probe " in capsys.readouterr().out
    assert main.run(["eval", "list"]) == 0
    assert " probe " not in capsys.readouterr().out, "dozens to a run would leave no row for anything else"


async def test_an_evaluation_of_a_run_opens(client):
    page = await text(client, "/runs/mine/evals")
    assert "baseline of v0" in html.unescape(re.sub("<[^>]+>", "", page))
    detail = (await client.get("/api/v1/runs/mine/evals/3")).json()
    assert (detail["card"]["kind"], detail["stats"]["num_rollouts"]) == ("final", 64)
    assert (await client.get("/api/v1/runs/mine/evals/9")).status_code == 404
    one = (await client.get("/api/v1/runs/mine/evals/3/rollouts/0")).json()
    assert len(one["siblings"]) == 2
    assert one["turns"], "sampled tokens are shown where they are known"


@pytest.mark.parametrize("path", ["/evaluations/nope", "/evaluations/..%2F..%2Fetc", "/runs/mine/evals/77"])
async def test_what_is_not_there_is_said_calmly(client, path):
    assert "Not here" in await text(client, path, 404)


async def test_what_a_run_was_started_with_is_not_told(client):
    detail = (await client.get(f"/api/v1{OWN}")).json()
    assert "launch" not in detail["metadata"]


async def test_a_folder_of_evaluations_is_no_folder_of_runs(workspace):
    app = create_app(workspace / "outputs/evals/words--m")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
        assert (await client.get("/api/v1/runs")).json()["runs"] == []
        assert len((await client.get("/api/v1/evaluations")).json()["evaluations"]) == 2


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("outputs/evals/words--m/aaaa0001", OWN),
        ("outputs/evals/words--m/aaaa0002", "/evaluations/words--m~aaaa0002"),
        ("outputs/evals/gsm8k--x/bbbb0001", "/evaluations/gsm8k--x~bbbb0001"),
        ("mine:final", "/runs/mine/evals/3"),
    ],
)
async def test_hub_command_line_and_browser_show_the_same_numbers(client, workspace, capsys, name, address):
    assert main.run(["eval", "view", name, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main.run(["eval", "view", name, "--plain"]) == 0
    printed = capsys.readouterr().out
    assert main.run(["eval", "list"]) == 0
    listed = capsys.readouterr().out
    detail = (await client.get(f"/api/v1{address}")).json()
    opened = OpenRun(Path(name))
    drawn = overview(opened.reader, opened.stats, 80).plain
    assert told["stats"] == detail["stats"] == plain(opened.stats) == plain(EvaluationReader(Path(name)).stats())

    reward = detail["stats"]["reward"]
    shown = f"{format_reward(reward['mean'])} {format_interval(reward['interval'])}"
    assert shown in printed
    assert [word in drawn for word in shown.split(" ", 1)] == [True, True]
    page = await text(client, address)
    assert all(word in page for word in shown.split(" ", 1))
    for metric, found in detail["stats"]["metrics"].items():
        assert metric in page
        assert metric in drawn
        assert all(format_interval(found["interval"]) in view for view in (page, drawn))

    entry = next(e for e in list_evaluations() if e.name == told["path"] or told["path"].endswith(e.name))
    card = detail["card"]
    assert (card["mean"], card["num_rollouts"]) == (entry.reward, entry.num_done)
    assert card["mean"] == pytest.approx(reward["mean"])
    assert format_reward(card["mean"]) in listed
    assert told["reward"] == pytest.approx(card["mean"])


def test_commands_open_the_evaluations_of_a_run(workspace, capsys):
    def told(*words):
        capsys.readouterr()
        code = main.run([*words, "--json"])
        return code, json.loads(capsys.readouterr().out)

    code, listed = told("eval", "list", "mine")
    assert (code, [row["kind"] for row in listed]) == (0, ["final", "interim", "baseline"])
    assert [row["path"] for row in listed] == [f"runs/mine:{number}" for number in (3, 2, 1)]
    everything = told("eval", "list")[1]
    assert {row["path"] for row in everything} > {row["path"] for row in listed}
    assert told("eval", "view", "mine")[1]["path"] == "runs/mine:3", "the newest"
    code, compared = told("eval", "compare", "mine:baseline", "runs/mine:3")
    assert (code, compared["num_tasks"], compared["before"], compared["after"]) == (0, 32, "runs/mine:1", "runs/mine:3")
    assert -1.0 <= compared["difference"]["interval"][0] < compared["difference"]["interval"][1] <= 1.0
    assert told("eval", "check", "mine:final")[1]["distribution"]["num_rollouts"] == 64
    assert told("eval", "export", "mine:final", "-f", "csv")[1]["path"] == "runs/mine/report-3.csv"
    assert main.run(["eval", "view", "mine:nowhere"]) == 2
    assert "there are 1 to 3: baseline, interim, final" in capsys.readouterr().err


def test_a_damaged_run_is_listed_with_the_reason(workspace, capsys):
    (workspace / "runs/broken").mkdir()
    (workspace / "runs/broken/run.db").write_bytes(b"not a database at all" * 100)
    assert main.run(["eval", "list", "--json"]) == 0
    rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)}
    assert "problem" in rows["runs/broken"]
    assert "runs/mine:3" in rows
