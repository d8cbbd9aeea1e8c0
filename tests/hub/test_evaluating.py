"""Hosted evaluations: what may be asked for, and what becomes of one on this machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.hub.archives_made import push, source, wheel

from mettle.hub.evaluating import local_queue, outcome, program, worker
from mettle.hub.evaluating.local_queue import LocalQueue
from mettle.hub.training import jobs
from mettle.hub.training.jobs import run_folder

HOSTED = "/api/v1/hosted-evaluations"
ASKED = {
    "environment": "reverse-text", "inference_model": "gpt",
    "eval_config": {"api_base_url": "http://x.test/v1", "num_examples": 2},
}  # fmt: skip


@pytest.fixture
def bob(hub):
    return hub.with_token("bob")


@pytest.fixture
def evaluations(hub):
    made = worker.EvaluationWorker(LocalQueue(hub.lab))
    yield made
    made.drop()


def asked(config=None, **more):
    return {**ASKED, "eval_config": {**ASKED["eval_config"], **(config or {})}, **more}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (asked({"api_key_var": "OPENAI_API_KEY"}), "no secret of yours"),
        (asked({"provider": "openai", "api_base_url": None}), "no secret of yours"),
        (asked({"provider": "nobody"}), "no provider"),
        (asked({"api_base_url": "http://169.254.169.254/latest"}), "the host's own"),
        (asked({"api_base_url": "file:///etc/passwd"}), "no address"),
        (asked({"headers": ["A: b"]}), "headers is not offered"),
        (asked({"output_dir": "/tmp"}), "output_dir is not offered"),
        (asked({"api_base_url": None}), "none of this Hub"),
        (asked({"api_base_url": None}, inference_model="c" + "a" * 24), "not found"),
        (asked(environment="no-such"), "not installed"),
        (asked(environment="os"), "no environment"),
    ],
)
def test_what_is_not_offered_is_refused_and_leaves_nothing(bob, monkeypatch, body, said):
    monkeypatch.setenv("OPENAI_API_KEY", "the operator's")
    answer = bob.post(HOSTED, json=body)
    assert answer.status_code == 422
    assert said in answer.json()["detail"]
    assert bob.get("/api/v1/evaluations/").json()["total"] == 0


def run_in_place_of_mettle(monkeypatch, code):
    popen = subprocess.Popen
    started = []

    def start(words, **more):
        started.append((words, more))
        return popen([sys.executable, "-c", code, words[-1]], **more)

    monkeypatch.setattr(worker.subprocess, "Popen", start)
    return started


def test_its_results_are_kept_among_the_pushed_and_on_the_leaderboard(hub, bob, evaluations, monkeypatch):
    push(bob, name="reverse-text", wheel_bytes=wheel("reverse-text"), source_bytes=source("reverse-text"))
    bob.post("/api/v1/secrets/", json={"name": "MY_KEY", "value": "sk-123456"})
    made = bob.post(HOSTED, json=asked({"api_key_var": "MY_KEY"}, environment="bob/reverse-text")).json()
    result = made["evaluation_id"]
    assert bob.get(f"/api/v1/evaluations/{result}").json()["status"] == "PENDING"
    rows = [json.dumps({"example_id": i, "reward": i / 4, "prompt": [], "completion": []}) for i in range(5)]
    started = run_in_place_of_mettle(
        monkeypatch,
        "import os, sys; from pathlib import Path; f = Path(sys.argv[1]) / 'results/a/b'; f.mkdir(parents=True);"
        f"(f / 'results.jsonl').write_text({chr(10).join(rows)!r}); (f / 'metadata.json').write_text('{{\"num_examples\": 5}}');"
        "print('the key is', os.environ['MY_KEY'])",
    )
    evaluations.step()
    order = json.loads(
        (outcome.evaluation_folder(hub.lab.folder, started[0][0][-1].rpartition("/")[2]) / program.ORDER).read_text()
    )
    assert order["settings"]["api_key_var"] == "MY_KEY"
    evaluations._child[1].wait(60)
    evaluations.step()
    shown = bob.get(f"/api/v1/evaluations/{result}").json()
    assert (shown["status"], shown["avg_score"], shown["total_samples"], shown["is_hosted"]) == (
        "COMPLETED",
        0.5,
        5,
        True,
    )
    assert shown["metadata"]["num_examples"] == 5
    assert bob.get(f"{HOSTED}/{result}/logs").json()["logs"] == "the key is [MY_KEY]\n"
    board = bob.get("/api/v1/evaluations/leaderboard", params={"environment": "bob/reverse-text"}).json()["places"]
    assert [place["model_name"] for place in board] == ["gpt"]
    page = hub.signed_in("bob")
    assert page.get(f"/hosted-evaluations/{result}", follow_redirects=False).status_code == 307
    by_itself = page.get(f"/hosted-evaluations/{result}", headers={"HX-Request": "true"}, follow_redirects=False)
    assert by_itself.headers["HX-Redirect"] == f"/evaluations/{result}", "the whole page goes there"


def test_one_that_fails_says_why_one_is_stopped_and_one_of_a_killed_hub_goes_on(hub, bob, evaluations, monkeypatch):
    first, second = (bob.post(HOSTED, json=ASKED).json()["evaluation_id"] for _ in range(2))
    run_in_place_of_mettle(monkeypatch, "import sys; print('error: no luck'); sys.exit(2)")
    evaluations.step()
    other = worker.EvaluationWorker(LocalQueue(hub.lab))  # as after a kill: what is RUNNING is nobody's child
    evaluations.drop()
    other.step()
    assert bob.get(f"/api/v1/evaluations/{first}").json()["status"] == "RUNNING"
    other._child[1].wait(60)
    other.step()
    failed = bob.get(f"{HOSTED}/{first}/logs").json()
    assert (bob.get(f"/api/v1/evaluations/{first}").json()["status"], failed["error"]) == ("FAILED", "no luck")
    assert "no luck" in hub.signed_in("bob").get(f"/hosted-evaluations/{first}").text
    assert bob.patch(f"{HOSTED}/{second}/cancel").json()["status"] == "CANCELLED"
    assert bob.patch(f"{HOSTED}/{second}/cancel").status_code == 409
    assert hub.with_token("eve").get(f"{HOSTED}/{first}/logs").status_code == 404


def test_one_that_goes_beyond_the_quota_is_stopped_midway(hub, bob, evaluations, monkeypatch, tmp_path):
    hub.lab.models = tmp_path / "models"
    (hub.lab.models / "small").mkdir(parents=True)
    (hub.lab.models / "small" / "config.json").write_text("{}")
    hub.signed_in("ann").form("/usage", action="quota", name="bob", figure="500")
    body = asked({"api_base_url": None}, inference_model="small")
    result = bob.post(HOSTED, json=body).json()["evaluation_id"]
    run_in_place_of_mettle(monkeypatch, "import time; time.sleep(600)")
    taken = [400]
    monkeypatch.setattr(outcome.usage, "played_tokens", lambda path: taken[0])
    monkeypatch.setattr(local_queue, "COUNT_EVERY_S", 0.0)
    evaluations.step()
    with hub.lab.database.read() as c:
        (job,) = jobs.with_status(c, jobs.RUNNING, jobs.EVAL)
    found = outcome.evaluation_folder(hub.lab.folder, job.id) / "results" / "a" / "b"
    found.mkdir(parents=True)
    (found / "run.db").touch()
    evaluations.step()
    assert evaluations._child[1].poll() is None, "400 of 500"
    taken[0] = 501
    evaluations.step()
    evaluations.step()
    evaluations._child[1].wait(60)
    evaluations.step()
    with hub.lab.database.read() as c:
        ended = jobs.job_of(c, job.id)
    assert (ended.status, ended.num_tokens) == (jobs.STOPPED, 501)
    assert ended.error == "stopped: the month's quota is used up"
    assert bob.get(f"/api/v1/evaluations/{result}").json()["status"] == "CANCELLED"


def test_a_version_of_ones_own_hosted_run_is_evaluated(hub, bob, tmp_path):
    run = bob.post(
        "/api/v1/rft/runs", json={"model": "tiny", "environments": [{"id": "reverse-text"}], "batch_size": 32}
    )
    run = run.json()["run"]["id"]
    local = asked({"api_base_url": None}, inference_model=f"{run}:v2")
    assert "nothing yet" in bob.post(HOSTED, json=local).json()["detail"]
    folder = run_folder(hub.lab.folder, run)
    for part in ("weights/v1", "weights/v2", "model"):
        (folder / part).mkdir(parents=True)
    (folder / "weights/v2/model.safetensors").write_bytes(b"w")
    (folder / "model/config.json").write_text("{}")
    (folder / "model/tokenizer.json").write_text("{}")
    assert bob.post(HOSTED, json=local).status_code == 201
    refused = hub.with_token("eve").post(HOSTED, json=local)
    assert (refused.status_code, "not found" in refused.json()["detail"]) == (422, True)
    with hub.lab.database.read() as c:
        (job,) = jobs.with_status(c, jobs.QUEUED, jobs.EVAL)
    (tmp_path / program.ORDER).write_text(json.dumps(job.config))
    words = program.command_of(tmp_path)
    assert words[3:5] == ["eval", "run"]
    assert f'"model" = "{tmp_path}/v2"' in (tmp_path / "eval.toml").read_text()
    assert (tmp_path / "v2/model.safetensors").read_bytes() == b"w"
    assert sorted(path.name for path in (tmp_path / "v2").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
