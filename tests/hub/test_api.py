"""The JSON API: what it says is what the ledger says, and it is described."""

import itertools
import math
import re

import httpx
import pytest

from mettle.storage.ledger import Ledger


async def get(client: httpx.AsyncClient, path: str, status: int = 200):
    answer = await client.get(f"/api/v1{path}")
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_runs_are_listed_with_the_live_one_first(browse, runs):
    cards = (await get(browse(runs), "/runs"))["runs"]
    assert [(c["name"], c["state"], c["step"]) for c in cards] == [("live", "running", 6), ("done", "finished", 10)]
    assert cards[1]["final"] > cards[1]["baseline"]
    assert len(cards[1]["rewards"]) == 10


async def test_a_folder_that_is_a_run_itself_is_a_list_of_one(browse, runs):
    cards = (await get(browse(runs / "done"), "/runs"))["runs"]
    assert [c["name"] for c in cards] == ["done"]
    assert (await get(browse(runs / "done"), "/runs/done"))["step"] == 10


async def test_summary_agrees_with_the_ledger(browse, runs):
    summary = await get(browse(runs), "/runs/live")
    ledger = Ledger(runs / "live" / "run.db", is_read_only=True)
    counts = ledger.task_counts()
    assert summary["tasks"]["trained"] == counts["trained"]
    assert summary["tasks"]["total"] == sum(counts.values())
    assert summary["step"] == ledger.last_batch().step == 6
    assert summary["acked_version"] == ledger.newest_version().weights.version
    rollouts = ledger.database.row("SELECT count(*), count(error_kind) FROM rollouts")
    assert (summary["num_rollouts"], summary["num_errors"]) == tuple(rollouts)
    assert summary["canary"]["worst_mean_abs_diff"] == max(v.canary.mean_abs_diff for v in ledger.versions())
    assert summary["eta_s"] > 0
    assert summary["is_live"]
    ledger.close()


async def test_step_rewards_count_dropped_groups_too(browse, tmp_path, run_writer):
    writer = run_writer(tmp_path / "run", steps=4, groups=2)
    writer.train_step(1)
    # Before step 2 is shipped a group in which everything succeeded is dropped: it carries no gradient, but it counts.
    before = {r["rollout_id"] for r in writer.ledger.database.rows("SELECT rollout_id FROM rollouts")}
    writer.skill = lambda step: 1.0
    assert writer.scored_group(2) is None
    del writer.skill
    writer.train_step(2)
    writer.ledger.close()
    ledger = Ledger(tmp_path / "run" / "run.db", is_read_only=True)
    rows = ledger.database.rows("SELECT rollout_id, reward FROM rollouts WHERE kind = 'train'")
    rewards = [r["reward"] for r in rows if r["rollout_id"] not in before and r["reward"] is not None]
    now = (await get(browse(tmp_path), "/runs/run"))["reward"]
    assert now["num_rollouts"] == len(rewards)
    assert now["mean"] == pytest.approx(sum(rewards) / len(rewards))
    ledger.close()


async def test_metrics_are_columns_and_go_on_after_a_step(browse, runs):
    client = browse(runs)
    assert "entropy/mean" in (await get(client, "/runs/done/metrics/names"))["names"]
    every = await get(client, "/runs/done/metrics?metric=entropy/mean&metric=loss/total")
    later = await get(client, "/runs/done/metrics?metric=entropy/mean&metric=loss/total&after_step=7")
    assert every["steps"] == list(range(1, 11))
    assert later["steps"] == [8, 9, 10]
    assert later["columns"]["loss/total"] == every["columns"]["loss/total"][7:]
    problem = await get(client, "/runs/done/metrics?metric=no/such", 404)
    assert problem["detail"] == "The run has no metric named 'no/such'."


async def test_events_go_on_after_an_id(browse, runs):
    client = browse(runs)
    every = (await get(client, "/runs/done/events"))["events"]
    assert (await get(client, f"/runs/done/events?after_id={every[-2]['event_id']}"))["events"] == every[-1:]
    assert {e["kind"] for e in (await get(client, "/runs/done/events?kind=restart"))["events"]} == {"restart"}


async def test_waits_and_processes_say_who_waits_for_whom(browse, runs):
    waits = (await get(browse(runs), "/runs/live/waits"))["waits"]
    assert {(w["owner"], w["edge"], w["awaits"]) for w in waits} == {
        ("trainer", "batch", "orchestrator ships step 7"),
        ("orchestrator", "rollouts", "12 groups in flight"),
    }
    assert all(w["waited_s"] >= 0 and not w["is_overdue"] for w in waits)
    processes = {p["name"]: p for p in (await get(browse(runs), "/runs/live/processes"))["processes"]}
    assert processes["trainer"]["restarts"] == 1
    assert processes["trainer"]["is_alive"]


async def test_evaluations_have_their_intervals(browse, runs):
    evals = (await get(browse(runs), "/runs/done/evals"))["evals"]
    assert [e["kind"] for e in evals] == ["baseline", *["interim"] * 4, "final"]
    assert all(e["ci_low"] <= e["mean"] <= e["ci_high"] for e in evals)


@pytest.mark.parametrize(
    ("query", "condition"),
    [
        ("step=4&kind=train", "step = 4 AND kind = 'train'"),
        ("step=4", "step = 4"),
        ("kind=eval", "kind = 'eval'"),
        ("min_reward=0.9", "reward >= 0.9"),
        ("errors=true", "error_kind IS NOT NULL"),
        ("env=nowhere", "0"),
    ],
)
async def test_a_filter_finds_what_the_ledger_has(browse, runs, query, condition):
    page = await get(browse(runs), f"/runs/done/rollouts?page_size=500&{query}")
    ledger = Ledger(runs / "done" / "run.db", is_read_only=True)
    wanted = {r[0] for r in ledger.database.rows(f"SELECT rollout_id FROM rollouts WHERE {condition}")}
    assert page["total"] == len(wanted)
    assert {r["rollout_id"] for r in page["rollouts"]} <= wanted
    ledger.close()


async def test_pages_hold_every_rollout_once(browse, runs):
    client, seen, page = browse(runs), [], 1
    while True:
        found = await get(client, f"/runs/done/rollouts?sort=-reward&page_size=100&page={page}")
        seen += found["rollouts"]
        if page == found["num_pages"]:
            break
        page += 1
    assert len(seen) == len({r["rollout_id"] for r in seen}) == found["total"]
    rewards = [r["reward"] for r in seen if r["reward"] is not None]
    assert rewards == sorted(rewards, reverse=True)


async def test_a_rollout_opens_with_tokens_and_siblings(browse, runs):
    client = browse(runs)
    rows = (await get(client, "/runs/done/rollouts?kind=train&sort=oldest&min_reward=0"))["rollouts"]
    detail = await get(client, f"/runs/done/rollouts/{rows[0]['rollout_id']}")
    tokens = detail["turns"][0]["tokens"]
    said = detail["messages"][-1]["content"]
    assert "".join(tokens["texts"]) == f"{said}<|end|>"
    assert len(tokens["ids"]) == len(tokens["logprobs"]) == len(tokens["versions"]) == rows[0]["num_tokens"]
    assert detail["turns"][0]["prompt_text"].startswith("<|system|>Reverse the text.")
    assert detail["is_decoded"]
    assert [s["position"] for s in detail["siblings"]] == list(range(8))
    rewards = [s["reward"] for s in detail["siblings"] if s["reward"] is not None]
    for sibling in detail["siblings"]:
        if sibling["reward"] is not None:
            assert math.isclose(sibling["advantage"], sibling["reward"] - sum(rewards) / len(rewards), abs_tol=1e-9)


async def test_logs_have_a_tail_a_level_and_words(browse, runs):
    client = browse(runs)
    assert await get(client, "/runs/done/logs") == ["trainer.log", "trainer.out"]
    tail = await get(client, "/runs/done/logs/trainer.log?lines=3")
    assert [line["message"] for line in tail["lines"]] == ["stepped", "stepped", "slow disk"]
    assert tail["is_cut"]
    assert tail["lines"][0]["extra"] == {"step": 38, "loss": 0.01}
    warned = await get(client, "/runs/done/logs/trainer.log?level=warning")
    assert [line["message"] for line in warned["lines"]] == ["slow disk"]
    plain = await get(client, "/runs/done/logs/trainer.out")
    assert plain["lines"][0]["message"] == "plain words of the process"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/runs/nobody", 404),
        ("/runs/done/rollouts/nobody", 404),
        ("/runs/done/logs/nobody.log", 404),
        ("/runs/done/rollouts?sort=sideways", 422),
        ("/runs/done/rollouts?page=0", 422),
        ("/runs/done/metrics", 422),
        ("/nothing", 404),
    ],
)
async def test_errors_are_one_clear_sentence(browse, runs, path, status):
    problem = await get(browse(runs), path, status)
    assert list(problem) == ["title", "status", "detail"]
    assert problem["status"] == status
    assert problem["detail"]


async def test_openapi_describes_every_call_and_no_call_changes_anything(browse, runs):
    document = await get(browse(runs), "/openapi.json")
    for path, calls in document["paths"].items():
        assert list(calls) == ["get"], path
        answer = calls["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert answer, path
        assert calls["get"].get("description"), path


async def test_no_number_in_an_address_is_too_large_for_an_answer(browse, runs):
    """Every field of every call and page, as the routes themselves list them."""
    client = browse(runs)
    num_asked = 0
    for route in walked(client._transport.app.routes):
        names = {field.alias for field in fields_of(route.dependant)}
        for name, value in itertools.product(names, ("9" * 23, "-" + "9" * 5000, "nan")):
            places = {"name": "done", "log": "trainer", name: value}
            path = re.sub(r"\{(\w+)(:\w+)?\}", lambda m, places=places: places.get(m[1], "1"), route.path)
            answer = await client.get(path, params={"metric": "loss", name: value})
            assert answer.status_code < 500, (route.path, name, value, answer.text[:200])
            num_asked += 1
    assert num_asked > 150


def fields_of(dependant):
    yield from (*dependant.query_params, *dependant.path_params)
    for inner in dependant.dependencies:
        yield from fields_of(inner)


def walked(routes):
    """Those that have fields, also of included routers."""
    for route in routes:
        yield from walked(getattr(getattr(route, "original_router", None), "routes", []))
        if hasattr(route, "dependant"):
            yield route


async def test_health(browse, runs):
    assert (await browse(runs).get("/health")).json()["status"] == "ok"
