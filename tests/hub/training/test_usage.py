"""What jobs take is counted once, at the price of the moment; quotas refuse what would lead beyond them, and stop it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.hub.conftest import RunWriter

from mettle.hub.training import jobs, usage, worker
from mettle.hub.training.jobs import run_folder

RUNS = "/api/v1/rft/runs"
BODY = {
    "model": "tiny", "environments": [{"id": "reverse-text"}], "max_steps": 3, "batch_size": 32,
    "rollouts_per_example": 8, "max_tokens": 8,
}  # fmt: skip
MOST = 3 * 32 * 2048
"""What the sequences of `BODY` can hold."""
NOVEMBER, DECEMBER = 1_793_500_000.0, 1_796_500_000.0


@pytest.fixture
def bob(hub):
    return hub.with_token("bob")


@pytest.fixture
def ann(hub):
    return hub.signed_in("ann")


@pytest.fixture
def asleep(monkeypatch):
    """What the worker starts sleeps until it is ended."""
    started, popen = [], subprocess.Popen

    def start(words, **more):
        started.append(popen([sys.executable, "-c", "import time; time.sleep(600)"], **more))
        return started[-1]

    monkeypatch.setattr(worker.subprocess, "Popen", start)
    yield started
    for process in started:
        process.kill()
        process.wait()


def submitted(client, **changes):
    return client.post(RUNS, json={**BODY, **changes})


def job_of(hub, run_id):
    with hub.lab.database.read() as c:
        return jobs.job_of(c, run_id)


def settle(hub, run_id, total, **more):
    with hub.lab.database.write() as c:
        return usage.settle(c, jobs.job_of(c, run_id), total, **more)


def owner_of(client, name="bob", **params):
    owners = client.get("/api/v1/usage", params=params).json()["owners"]
    return next(each for each in owners if each["owner"] == name)


def test_tokens_are_counted_once_by_month_and_keep_their_price(hub, bob, ann):
    run = submitted(bob).json()["run"]["id"]
    assert settle(hub, run, 1_000_000, now=NOVEMBER) == 1_000_000
    assert ann.form("/usage", action="price", name="*", figure="2").status_code == 303
    assert settle(hub, run, 1_000_000, now=NOVEMBER) == 0, "the same look twice"
    assert settle(hub, run, 1_500_000, now=NOVEMBER) == 500_000
    assert settle(hub, run, 1_600_000, now=DECEMBER) == 100_000
    assert settle(hub, run, 7, now=DECEMBER) == 0, "a run begun anew"
    november, december = (owner_of(bob, month=usage.month_of(at)) for at in (NOVEMBER, DECEMBER))
    assert (november["tokens"], november["usd"]) == (1_500_000, 1.0)
    assert (december["tokens"], december["usd"]) == (100_000, pytest.approx(0.2))
    assert november["people"] == [{"user": "bob", "tokens": 1_500_000, "usd": 1.0}]


def test_a_run_that_is_deleted_has_still_been_run(hub, bob):
    run = submitted(bob).json()["run"]["id"]
    settle(hub, run, 5000)
    assert bob.put(f"{RUNS}/{run}/stop").status_code == 200
    assert bob.delete(f"{RUNS}/{run}").status_code == 200
    assert owner_of(bob)["tokens"] == 5000


def test_a_job_beyond_the_quota_is_refused_with_one_line(hub, bob, ann):
    assert ann.form("/usage", action="quota", name="bob", figure=f"{2 * MOST:,}").status_code == 303
    assert submitted(bob).status_code == 201
    assert submitted(bob).status_code == 201
    refused = submitted(bob)
    assert (refused.status_code, refused.json()["code"]) == (403, "quota_exceeded")
    said = refused.json()["detail"]
    assert f"may take {MOST:,} tokens, and bob has 0 left of {2 * MOST:,}" in said
    assert "\n" not in said
    assert ann.form("/usage", action="quota", name="bob", figure="").status_code == 303
    assert submitted(bob).status_code == 201


def test_the_first_steps_of_a_branch_are_not_counted_again(tmp_path):
    writer = RunWriter(tmp_path / "run", steps=4, groups=1)
    for step in (1, 2, 3):
        writer.train_step(step)
    counted = [row.num_tokens for row in writer.ledger.batches()]
    assert usage.trained_tokens(writer.dir.ledger) == sum(counted)
    writer.ledger.journal.set_fact("branched_from", {"run": "/runs/other", "step": 2})
    assert usage.trained_tokens(writer.dir.ledger) == counted[2]


def test_a_run_that_goes_beyond_the_quota_is_stopped_and_waits_for_room(hub, bob, ann, asleep):
    run = submitted(bob).json()["run"]["id"]
    queue = worker.QueueWorker(hub.lab)
    queue.step()
    writer = RunWriter(run_folder(hub.lab.folder, run), steps=4, groups=1)
    writer.train_step(1)
    queue.step()
    taken = job_of(hub, run).num_tokens
    assert taken == usage.trained_tokens(writer.dir.ledger) > 0
    assert not job_of(hub, run).is_stop_wanted
    ann.form("/usage", action="quota", name="bob", figure=str(taken))
    writer.train_step(2)
    queue._counted_at.clear()
    queue.step()
    assert (job_of(hub, run).is_stop_wanted, job_of(hub, run).num_tokens > taken) == (True, True)
    asleep[0].kill()
    asleep[0].wait()
    queue.step()
    ended = job_of(hub, run)
    assert (ended.status, ended.error) == (jobs.STOPPED, "stopped: the month's quota is used up")
    assert bob.put(f"{RUNS}/{run}/restart").json()["code"] == "quota_exceeded"
    queue.close()


def test_a_plan_is_the_most_until_a_run_of_its_kind_has_ended(hub, bob):
    first = submitted(bob).json()["run"]
    assert (first["plannedTokens"], first["plannedSeconds"]) == (MOST, None)
    assert first["planBasis"].startswith("at most")
    settle(hub, first["id"], 9600)
    with hub.lab.database.write() as c:
        jobs.set_values(c, first["id"], status=jobs.COMPLETED, started_at=100.0, ended_at=148.0)
    second = submitted(bob, max_steps=6).json()["run"]
    assert (second["plannedTokens"], second["plannedSeconds"]) == (19_200, 96.0)
    assert submitted(bob, environments=[{"id": "arithmetic"}]).json()["run"]["plannedSeconds"] is None


def test_quotas_and_prices_are_an_admins_and_say_what_is_wrong(hub, bob, ann):
    assert ann.form("/usage", action="quota", name="nobody", figure="5").status_code == 404
    assert ann.form("/usage", action="quota", name="bob", figure="-5").status_code == 422
    assert ann.form("/usage", action="price", name="tiny", figure="nan").status_code == 422
    assert hub.signed_in("bob").form("/usage", action="quota", name="bob", figure="5").status_code == 403
    assert ann.form("/usage", action="price", name="tiny", figure="0.5").status_code == 303
    (model,) = bob.get("/api/v1/rft/models").json()["models"]
    assert (model["name"], model["trainingPricePerMtok"]) == ("tiny", 0.5)
    assert "$0.50 a million tokens" in ann.get("/usage").text
