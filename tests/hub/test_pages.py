"""The pages: each is there without scripts, and a damaged run gives a sentence instead of a trace."""

import os
import re
import shutil
import sqlite3
import threading
import time
from types import SimpleNamespace

import pytest

from mettle.hub.pages import FOLDER, templates
from mettle.inference.outside.checks import WorkFault
from mettle.inference.outside.roster import Roster, invite
from mettle.processes.beats import Beat, Questions
from mettle.records.versions import WeightVersion
from mettle.storage.ledger import Ledger

RUN_PAGES = ["", "/rollouts", "/metrics", "/config", "/logs"]


async def text(client, path, status=200, **kw):
    answer = await client.get(path, **kw)
    assert answer.status_code == status, answer.text
    return answer.text


async def test_every_page_is_a_whole_page(browse, runs):
    client = browse(runs)
    for path in ["/", *[f"/runs/{run}{page}" for run in ("done", "live") for page in RUN_PAGES]]:
        html = await text(client, path)
        assert html.startswith("<!doctype html>"), path
        assert html.rstrip().endswith("</html>"), path
        assert len(re.findall("<h1", html)) == 1, path
        assert "None" not in re.sub(r"<script.*?</script>", "", html, flags=re.S), path


async def test_overview_shows_the_figures_without_scripts(browse, runs):
    client = browse(runs)
    summary = (await client.get("/api/v1/runs/done")).json()
    html = await text(client, "/runs/done")
    for words in (
        f"{summary['baselines'][0]['mean']:.3f}", f"{summary['finals'][0]['mean']:.3f}", "Step 10", "finished",
        "reverse-text", "tiny", "weights v10 served", "11 versions checked", "1 restart", "zero advantage"
        if summary["tasks"]["dropped"] else "each counted once",
    ):  # fmt: skip
        assert words in html, words


async def test_a_live_run_shows_who_waits_for_whom(browse, runs):
    html = await text(browse(runs), "/runs/live")
    assert "orchestrator ships step 7" in html
    assert "12 groups in flight" in html
    assert "so far" in html


async def test_a_process_that_stands_still_is_named_on_the_page(browse, tmp_path, run_writer):
    writer = run_writer(tmp_path / "run", steps=4, groups=2)
    writer.train_step(1)
    writer.leave_running(2)
    writer.beat(Beat("inference", writer.pid, time.monotonic() + 3600, paused_s=40.0))
    client = browse(tmp_path)
    html = await text(client, "/runs/run")
    assert "was told to pause (POST /admin/pause) and has not sampled for 40 s" in html
    assert re.search(
        r'class="node tone-bad">\s*<p class="node-name">.*?inference</p>\s*<p class="node-state">paused', html
    )
    vitals = {v["process"]: v for v in (await client.get("/api/v1/runs/run/vitals")).json()["vitals"]}
    assert {name: vital["fault"] for name, vital in vitals.items()} == {
        "inference": "paused", "orchestrator": None, "trainer": None,
    }  # fmt: skip
    writer.ledger.close()


async def test_a_judge_that_answers_nobody_is_named_on_the_page(browse, tmp_path, run_writer):
    writer = run_writer(tmp_path / "run", steps=4, groups=2)
    writer.train_step(1)
    writer.leave_running(2)
    asked = (Questions("judge j at http://far/v1", 3, 25.0),)
    writer.beat(Beat("worker-words-7", writer.pid, time.monotonic() + 3600, has_work=True, asked=asked))
    html = await text(browse(tmp_path), "/runs/run")
    assert "judge j at http://far/v1 has not answered for 25 s; 3 questions of worker-words-7 wait" in html
    writer.ledger.close()


async def test_workers_from_outside_are_shown_where_there_are_any(browse, tmp_path, run_writer):
    writer = run_writer(tmp_path / "run", steps=4, groups=2)
    writer.train_step(1)
    client, folder = browse(tmp_path), tmp_path / "run" / "outside"
    assert "Worker from outside" not in await text(client, "/runs/run")
    roster = Roster(folder)
    ann = roster.join("k" * 64, roster.invitation(invite(folder, "ann <b>")))
    ann.sampled = 1234
    roster.ban(ann, WorkFault("tokens", "2 of 9"))
    html = await text(client, "/runs/run")
    assert "ann &lt;b&gt;" in html
    assert "1,234" in html
    assert "tokens: 2 of 9" in html
    (folder / "roster.json").write_text("[")
    assert "Worker from outside" not in await text(client, "/runs/run")


async def test_a_wait_past_its_budget_is_told(browse, tmp_path, run_writer):
    writer = run_writer(tmp_path / "run", steps=4, groups=2)
    writer.train_step(1)
    writer.clock.now -= 700
    writer.wait("trainer/rank-0", "batch", "orchestrator ships step 2", 600)
    html = await text(browse(tmp_path), "/runs/run")
    assert re.search(r'class="wait overdue"[^>]*>waiting [^:]+: orchestrator ships step 2', html)
    writer.ledger.close()


async def test_the_warm_up_is_shown_until_there_is_a_policy(browse, tmp_path):
    (tmp_path / "run").mkdir()
    ledger = Ledger(tmp_path / "run" / "run.db")
    ledger.journal.set_fact("state", "running")
    client = browse(tmp_path)
    assert 'data-stage="warming"' in await text(client, "/runs/run")
    ledger.journal.record_metrics(7, {"sft/loss": 2.0})
    ledger.journal.record_metrics(8, {"sft/loss": 1.5, "sft/reward": 0.25})
    answer = (await client.get("/runs/run/live.json")).json()
    assert answer["is_warming"]
    assert answer["warm_up"] == {"steps": [7, 8], "columns": {"sft/reward": [None, 0.25], "sft/loss": [2.0, 1.5]}}
    assert "Warm-up reward" in answer["fragments"]["headline"]
    assert "0.250" in answer["fragments"]["headline"]
    weights = WeightVersion(0, "weights/v0", "abc")
    ledger.publish(weights)
    ledger.acknowledge(weights, None, 1.0)
    assert not (await client.get("/runs/run/live.json")).json()["is_warming"]
    ledger.close()


async def test_live_json_brings_only_what_is_new(browse, tmp_path, run_writer):
    writer = run_writer(tmp_path / "run", steps=9, groups=2)
    for step in (1, 2, 3):
        writer.train_step(step)
    client = browse(tmp_path)
    first = (await client.get("/runs/run/live.json")).json()
    assert first["steps"] == [1, 2, 3]
    writer.train_step(4)
    second = (await client.get(f"/runs/run/live.json?after_step=3&change={first['change']}")).json()
    assert second["steps"] == [4]
    assert second["change"] > first["change"]
    assert "Step 4" in second["fragments"]["header"]
    writer.finish()
    done = (await client.get("/runs/run/live.json?after_step=4")).json()
    again = await client.get(f"/runs/run/live.json?after_step=4&change={done['change']}")
    assert again.json() == {"change": done["change"], "is_live": False}


async def test_a_restart_asks_the_page_to_read_all_steps_again(browse, tmp_path, run_writer):
    writer = run_writer(tmp_path / "run", steps=30, groups=2)
    for step in (1, 2, 3):
        writer.train_step(step)
    client = browse(tmp_path)
    before = (await client.get("/runs/run/live.json")).json()
    writer.ledger.journal.record_process("trainer", "restarting", pid=1, restarts=1, exit_code=-9)
    writer.ledger.journal.record_metrics(1, {"entropy/mean": 9.0})
    after = (await client.get("/runs/run/live.json")).json()
    assert after["revision"] != before["revision"]
    assert after["columns"]["entropy"][0] == 9.0
    writer.ledger.close()


async def test_rollouts_page_filters_and_serves_parts(browse, runs):
    client = browse(runs)
    html = await text(client, "/runs/done/rollouts?step=4&sort=-reward&min_reward=&errors=")
    assert "of step 4" in html
    part = await text(client, "/runs/done/rollouts?step=4", headers={"hx-request": "true"})
    assert part.startswith('<section id="rollouts">')
    assert "step is a whole number" in await text(client, "/runs/done/rollouts?step=four", 422)


async def test_rollout_page_marks_where_the_weights_changed(browse, runs):
    client = browse(runs)
    rows = (await client.get("/api/v1/runs/done/rollouts?step=6&kind=train")).json()["rollouts"]
    row = next(r for r in rows if r["version_min"] < r["version_max"])
    html = await text(client, f"/runs/done/rollouts/{row['rollout_id']}")
    assert f">v{row['version_max']}</span>" in html
    assert html.count('role="listitem"') == row["num_tokens"]
    assert len(re.findall(r'class="place"', html)) == 8


async def test_config_page_tells_sources(browse, runs):
    html = await text(browse(runs), "/runs/done/config")
    assert re.search(r"lr</td><td[^>]*>0.0003</td><td[^>]*>quickstart.toml:12", html)
    assert re.search(r"schedule</td><td[^>]*>&#34;cosine&#34;</td><td[^>]*>default", html)
    assert re.search(r"id</td><td[^>]*>&#34;reverse-text&#34;</td><td[^>]*>quickstart.toml", html)


async def test_a_log_is_found_by_its_process(browse, runs):
    html = await text(browse(runs), "/runs/done/logs/trainer")
    assert "slow disk" in html
    part = await text(browse(runs), "/runs/done/logs/trainer.log?level=warning", headers={"hx-request": "true"})
    assert part.startswith('<section id="log"')
    assert "stepped" not in part


async def test_an_empty_folder_says_how_to_begin(browse, tmp_path):
    assert "mettle quickstart" in await text(browse(tmp_path), "/")


async def test_a_run_that_has_not_written_yet_is_listed(browse, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run.toml").write_text("max_steps = 3\n")
    client = browse(tmp_path)
    assert "has no run.db" in await text(client, "/")
    assert "has no run.db" in await text(client, "/runs/new", 503)


@pytest.fixture
def damaged(runs, tmp_path):
    return shutil.copytree(runs / "done", tmp_path / "runs" / "done")


async def test_a_ledger_that_is_no_database_is_told(browse, damaged):
    for name in ("run.db-wal", "run.db-shm"):
        (damaged / name).unlink(missing_ok=True)
    (damaged / "run.db").write_bytes(b"not a database" * 300)
    client = browse(damaged.parent)
    assert "file is not a database" in await text(client, "/")
    for page in ("", "/rollouts", "/metrics"):
        html = await text(client, f"/runs/done{page}", 503)
        assert "This cannot be read" in html
        assert "Traceback" not in html
    assert "file is not a database" in (await client.get("/api/v1/runs/done")).json()["detail"]


async def test_a_ledger_without_tables_is_told(browse, tmp_path):
    (tmp_path / "run").mkdir()
    sqlite3.connect(tmp_path / "run" / "run.db").close()
    assert "no such table" in await text(browse(tmp_path), "/runs/run", 503)


@pytest.mark.parametrize("harm", ["cut", "gone", "changed"])
async def test_a_damaged_shard_spoils_its_rollouts_only(browse, damaged, harm):
    client = browse(damaged.parent)
    row = (await client.get("/api/v1/runs/done/rollouts?kind=train&sort=newest")).json()["rollouts"][0]
    shard = damaged / "rollouts" / "shard-00000.bin"
    data = shard.read_bytes()
    if harm == "gone":
        shard.unlink()
    else:
        shard.write_bytes(
            data[: len(data) // 2] if harm == "cut" else data[: len(data) // 2] + b"\xff" * (len(data) // 2)
        )
    html = await text(client, f"/runs/done/rollouts/{row['rollout_id']}", 503)
    assert "shard-00000.bin" in html
    await text(client, "/runs/done")
    await text(client, "/runs/done/rollouts")


async def test_a_run_replaced_by_another_of_its_name_is_opened_anew(browse, tmp_path, run_writer):
    client = browse(tmp_path)
    writer = run_writer(tmp_path / "run", steps=5, groups=2)
    writer.train_step(1)
    writer.ledger.close()
    assert (await client.get("/api/v1/runs/run")).json()["step"] == 1
    shutil.rmtree(tmp_path / "run")
    writer = run_writer(tmp_path / "run", steps=5, groups=2)
    writer.train_step(1)
    writer.train_step(2)
    writer.ledger.close()
    assert (await client.get("/api/v1/runs/run")).json()["step"] == 2


async def test_a_run_whose_processes_are_gone_is_interrupted(browse, tmp_path, run_writer, monkeypatch):
    writer = run_writer(tmp_path / "run", steps=5, groups=2, pid=2**22 + 1)
    writer.train_step(1)
    writer.ledger.close()
    assert (await browse(tmp_path).get("/api/v1/runs/run")).json()["state"] == "running", "written a moment ago"
    monkeypatch.setattr("mettle.hub.summary.QUIET_S", -1.0)
    html = await text(browse(tmp_path), "/runs/run")
    assert "interrupted" in html
    assert "mettle rl resume run" in html


async def test_reading_while_another_thread_writes(browse, tmp_path, run_writer):
    writer = run_writer(tmp_path / "run", steps=40, groups=2)
    problems: list[BaseException] = []

    def write():
        try:
            for step in range(1, 16):
                writer.train_step(step)
        except BaseException as error:
            problems.append(error)

    client, seen, rows = browse(tmp_path), [], {}

    async def poll():
        answer = (await client.get(f"/runs/run/live.json?after_step={max(rows, default=-1) - 3}")).json()
        rows.update(zip(answer["steps"], answer["columns"]["reward_mean"], strict=True))
        seen.append((await client.get("/api/v1/runs/run")).json()["step"])

    thread = threading.Thread(target=write)
    thread.start()
    while thread.is_alive():
        await poll()
    thread.join()
    await poll()
    assert not problems
    assert seen == sorted(seen)
    assert seen[-1] == 15
    fresh = (await browse(tmp_path).get("/runs/run/live.json")).json()
    assert rows == dict(zip(fresh["steps"], fresh["columns"]["reward_mean"], strict=True))
    writer.ledger.close()


def test_the_hub_leaves_a_run_as_it_was(runs):
    ledger = Ledger(runs / "done" / "run.db", is_read_only=True)
    with pytest.raises(Exception, match="readonly"):
        ledger.journal.set_fact("state", "changed")
    ledger.close()


async def test_the_list_of_rollouts_shows_what_was_asked_and_answered_and_is_searched_by_words(browse, runs):
    client = browse(runs)
    rows = (await client.get("/api/v1/runs/done/rollouts?kind=train&page_size=500")).json()["rollouts"]
    row = next(r for r in rows if r["excerpt"] and r["prompt"])
    html = await text(client, f"/runs/done/rollouts?words={row['excerpt']}")
    assert f'<td class="excerpt">{row["prompt"]}</td>' in html
    assert f'<td class="excerpt said">{row["excerpt"]}</td>' in html
    word = row["excerpt"].split()[0]
    found = (await client.get("/api/v1/runs/done/rollouts", params={"words": word})).json()
    assert found["total"] > 0
    assert all(word.casefold() in f"{r['excerpt']} {r['error']}".casefold() for r in found["rollouts"])
    assert (await client.get("/api/v1/runs/done/rollouts", params={"words": "100%_\\"})).json()["total"] == 0
    assert "Use fewer words" in await text(client, "/runs/done/rollouts?words=nowhere")


@pytest.mark.parametrize(("state", "is_live", "told"), [
    ("running", True, "The next evaluation is still to come."),
    ("failed", False, "The run failed before it was evaluated again."),
    ("stopped", False, "The run ended before it was evaluated again."),
])  # fmt: skip
def test_a_run_that_is_over_does_not_wait_for_an_evaluation(state, is_live, told):
    baseline = SimpleNamespace(
        env_id="e", mean=0.5, kind="baseline", step=0, ci_low=0.4, ci_high=0.6, num_tasks=10
    )  # fmt: skip
    summary = SimpleNamespace(state=state, is_live=is_live)
    headline = templates().get_template("_headline.html")
    said = headline.render(s=summary, pairs=[(baseline, None)], warm_up=None)
    assert told in said
    assert ("still to come" in said) is is_live
    said = headline.render(s=summary, pairs=[], warm_up=None)
    assert ("before the first step" in said) is is_live


async def test_what_scrolls_can_be_focused(browse, runs):
    client = browse(runs)
    for path, place in (("", "events"), ("/rollouts", "table-card"), ("/config", "table-card")):
        html = await text(client, f"/runs/done{path}")
        found = re.findall(rf'<\w+ [^>]*class="[^"]*{place}[^"]*"[^>]*>', html)
        assert all('tabindex="0"' in tag and "aria-label" in tag for tag in found), found


async def test_a_long_list_of_runs_comes_in_pages_and_opens_those_of_its_page(tmp_path, browse):
    for index in range(120):
        (tmp_path / f"run-{index:03d}").mkdir()
        (tmp_path / f"run-{index:03d}" / "run.toml").write_text("")
        os.utime(tmp_path / f"run-{index:03d}", (1e9 + index, 1e9 + index))
        os.utime(tmp_path / f"run-{index:03d}" / "run.toml", (1e9 + index, 1e9 + index))
    async with browse(tmp_path) as client:
        shown = [re.findall(r'href="/runs/(run-\d+)"', (await client.get(f"/?page={n}")).text) for n in (1, 2, 3)]
        beyond = (await client.get("/?page=4")).text
    assert [len(names) for names in shown] == [50, 50, 20]
    assert {name for names in shown for name in names} == {f"run-{index:03d}" for index in range(120)}
    assert min(shown[0]) == "run-070"
    assert "No runs on page 4" in beyond


def test_a_bar_fills_at_most_its_track_and_what_it_says_is_escaped():
    marks = templates().get_template("_marks.html").module
    filled = [re.findall(r'class="value" width="([\d.]+)"', marks.bar(part)) for part in (-0.5, 0, 0.25, 1, 3, None)]
    assert filled == [["0"], ["0"], ["25.0"], ["100"], ["100"], []]
    assert 'role="img" aria-label="&lt;b&gt;"' in marks.bar(0.5, said="<b>")
    assert marks.reward_cell(None, otherwise="-") == '<td class="reward-cell"><span class="muted">-</span></td>'


def test_a_pager_leads_to_the_pages_that_there_are():
    pager = templates().get_template("_marks.html").module.pager
    found = [re.findall(r'href="([^"]*)"', pager("?words=a&", page, 3)) for page in (1, 2, 3)]
    assert found == [["?words=a&amp;page=2"], ["?words=a&amp;page=1", "?words=a&amp;page=3"], ["?words=a&amp;page=2"]]
    assert pager("?", 1, 1) == ""


def test_marks_that_several_pages_draw_are_drawn_in_one_file():
    files = [
        path for path in (FOLDER / "templates").glob("*.html") if re.search("reward-bar|class=.pager", path.read_text())
    ]
    assert [path.name for path in files] == ["_marks.html"]
