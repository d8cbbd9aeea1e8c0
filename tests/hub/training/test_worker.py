"""The worker: one run after the other, stops and goes on, and says why a run has failed."""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib

import pytest

from mettle.hub.training import jobs, program, worker
from mettle.hub.training.jobs import run_folder
from mettle.storage.checkpoints import write_checkpoint
from mettle.storage.run_dir import RunDir

BODY = {"model": "tiny", "environments": [{"id": "reverse-text"}], "max_steps": 3, "batch_size": 32, "max_tokens": 8}


@pytest.fixture
def bob(hub):
    return hub.with_token("bob")


@pytest.fixture
def programs(monkeypatch):
    """What the worker starts, in place of a run: one that ends at once with a word of its own, or sleeps."""
    started = []
    popen = subprocess.Popen

    def start(words, **more):
        sleeps = len(started) == 0
        code = "import time; time.sleep(600)" if sleeps else "import sys; print('error: no luck'); sys.exit(2)"
        started.append((words, popen([sys.executable, "-c", code], **more)))
        return started[-1][1]

    monkeypatch.setattr(worker.subprocess, "Popen", start)
    yield started
    for _, process in started:
        process.kill()
        process.wait()


def statuses(client):
    return [run["status"] for run in client.get("/api/v1/rft/runs").json()["runs"]][::-1]


def test_runs_are_taken_one_after_the_other_and_stopped(hub, bob, programs):
    first, second = (bob.post("/api/v1/rft/runs", json=BODY).json()["run"] for _ in range(2))
    assert (first["runsAhead"], second["runsAhead"]) == (0, 1)
    queue = worker.QueueWorker(hub.lab)
    queue.step()
    queue.step()
    assert statuses(bob) == ["RUNNING", "QUEUED"]
    words, process = programs[0]
    assert words[2:] == [
        "mettle.cli", "rl", "run", str(run_folder(hub.lab.folder, first["id"]).with_suffix(".toml")), "--dir",
        str(run_folder(hub.lab.folder, first["id"])), "--json",
    ]  # fmt: skip
    assert bob.delete(f"/api/v1/rft/runs/{first['id']}").status_code == 409
    assert bob.put(f"/api/v1/rft/runs/{first['id']}/stop").json()["run"]["status"] == "RUNNING"
    queue.step()
    process.wait(60)
    queue.step()
    assert statuses(bob) == ["STOPPED", "QUEUED"]
    queue.step()
    programs[1][1].wait(60)
    queue.step()
    assert statuses(bob) == ["STOPPED", "FAILED"]
    assert bob.get(f"/api/v1/rft/runs/{second['id']}").json()["run"]["errorMessage"] == "no luck"
    assert bob.put(f"/api/v1/rft/runs/{second['id']}/restart").json()["run"]["status"] == "QUEUED"
    assert bob.put(f"/api/v1/rft/runs/{second['id']}/restart").status_code == 409
    assert bob.put(f"/api/v1/rft/runs/{second['id']}/stop").json()["run"]["status"] == "STOPPED"
    assert bob.delete(f"/api/v1/rft/runs/{second['id']}").status_code == 200


def test_a_run_that_a_hub_has_left_behind_goes_on(hub, bob, programs, monkeypatch):
    run = bob.post("/api/v1/rft/runs", json=BODY).json()["run"]
    folder = run_folder(hub.lab.folder, run["id"])
    with hub.lab.database.write() as c:
        jobs.set_status(c, run["id"], jobs.RUNNING)
    folder.mkdir(parents=True)
    (folder / "run.db").touch()
    monkeypatch.setattr(worker, "supervisor_pid", lambda run_dir: 1)
    queue = worker.QueueWorker(hub.lab)
    queue.step()
    assert statuses(bob) == ["RUNNING"]
    monkeypatch.setattr(worker, "supervisor_pid", lambda run_dir: None)
    monkeypatch.setattr("mettle.runs.launch.is_finished", lambda path: False)
    queue.step()
    assert statuses(bob) == ["FAILED"]
    bob.put(f"/api/v1/rft/runs/{run['id']}/restart")
    queue.step()
    assert programs[0][0][3:] == ["rl", "resume", str(folder), "--json"]


def test_a_run_is_its_owners_and_its_pages_are_those_of_any_run(hub, bob, run_writer):
    run = bob.post("/api/v1/rft/runs", json=BODY).json()["run"]
    early = bob.get(f"/runs/{run['id']}")
    assert (early.status_code, early.headers["Refresh"]) == (404, "3"), "the page looks again by itself"
    writer = run_writer(run_folder(hub.lab.folder, run["id"]), steps=4, groups=2)
    for step in (1, 2):
        writer.train_step(step)
    writer.ledger.close()
    assert bob.get(f"/api/v1/rft/runs/{run['id']}/metrics").json()["metrics"][0]["step"] == 1
    assert "stepped" in bob.get(f"/api/v1/rft/runs/{run['id']}/logs", params={"component": "trainer"}).json()["logs"]
    assert run["id"] in bob.get(f"/runs/{run['id']}").text
    eve = hub.with_token("eve")
    for path in ("", "/metrics", "/logs", "/checkpoints", "/checkpoints/1"):
        assert eve.get(f"/api/v1/rft/runs/{run['id']}{path}").status_code == 404
    assert eve.get(f"/runs/{run['id']}").status_code == 404
    assert hub.anonymous().get(f"/runs/{run['id']}", follow_redirects=False).status_code == 303
    assert eve.get("/api/v1/rft/runs").json()["total"] == 0


def test_versions_are_listed_and_downloaded_as_a_tar(hub, bob, tmp_path):
    import io
    import tarfile

    from mettle.storage.run_dir import RunDir

    run = bob.post("/api/v1/rft/runs", json=BODY).json()["run"]
    folder = RunDir(run_folder(hub.lab.folder, run["id"])).version(3)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "weights.bin").write_bytes(b"x" * 1000)
    (found,) = bob.get(f"/api/v1/rft/runs/{run['id']}/checkpoints").json()["checkpoints"]
    assert (found["step"], found["sizeBytes"], found["status"]) == (3, 1002, "READY")
    data = bob.get(found["storageUrl"]).content
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert sorted(archive.getnames()) == ["adapter_config.json", "weights.bin"]
        assert archive.extractfile("weights.bin").read() == b"x" * 1000
    assert bob.get(f"/api/v1/rft/runs/{run['id']}/checkpoints/9").status_code == 404


def with_versions(hub, run, *numbers):
    for number in numbers:
        folder = RunDir(run_folder(hub.lab.folder, run["id"])).version(number)
        folder.mkdir(parents=True)
        (folder / "weights.bin").write_bytes(b"x")


def test_a_new_run_begins_from_a_version_with_the_steps_that_are_left(hub, bob, programs):
    asked = {**BODY, "max_steps": 5, "lora_rank": 4}
    run = bob.post("/api/v1/rft/runs", json=asked).json()["run"]
    with_versions(hub, run, 0, 2, 5)
    address = f"/api/v1/rft/runs/{run['id']}/restart"
    made = bob.put(address, params={"step": 2}).json()["run"]
    assert (made["status"], made["name"], made["maxSteps"]) == ("QUEUED", f"{run['name']} from v2", 3)
    assert made["plannedTokens"] == pytest.approx(run["plannedTokens"] * 3 / 5, abs=1)
    assert bob.get(f"/api/v1/rft/runs/{run['id']}").json()["run"]["status"] == "QUEUED"
    refused = bob.put(address, params={"step": 3})
    assert (refused.status_code, "it has v0, v2, v5" in refused.json()["detail"]) == (404, True)
    assert bob.put(address, params={"step": 5}).status_code == 409
    assert hub.with_token("eve").put(address, params={"step": 2}).status_code == 404
    bob.put(f"/api/v1/rft/runs/{run['id']}/stop")
    queue = worker.QueueWorker(hub.lab)
    queue.step()
    folder = run_folder(hub.lab.folder, made["id"])
    source, start = str(run_folder(hub.lab.folder, run["id"])), f"{folder}.start"
    assert programs[0][0][2:] == [
        "mettle.hub.training.program", source, "2", start, "rl", "run", f"{folder}.toml", "--dir", str(folder), "--json",
    ]  # fmt: skip
    written = tomllib.loads(folder.with_suffix(".toml").read_text())
    assert written["model"] == {"lora": {"rank": 4}, "path": start}
    assert (written["max_steps"], "warm_up" in written, "start" in written) == (3, False, False)


def test_where_there_is_a_checkpoint_the_new_run_is_a_branch_with_all_that_the_earlier_one_had(hub, bob, programs):
    run = bob.post("/api/v1/rft/runs", json={**BODY, "max_steps": 5}).json()["run"]
    with_versions(hub, run, 2, 3)
    source = run_folder(hub.lab.folder, run["id"])
    write_checkpoint(RunDir(source).checkpoints, 2, lambda folder: (folder / "state").write_bytes(b"x"), {})
    address = f"/api/v1/rft/runs/{run['id']}/restart"
    made, other = [bob.put(address, params={"step": step}).json()["run"] for step in (2, 3)]
    assert (made["maxSteps"], other["maxSteps"]) == (5, 2)
    assert made["plannedTokens"] == pytest.approx(run["plannedTokens"] * 3 / 5, abs=1)
    bob.put(f"/api/v1/rft/runs/{run['id']}/stop")
    worker.QueueWorker(hub.lab).step()
    folder = run_folder(hub.lab.folder, made["id"])
    assert programs[0][0][2:] == [
        "mettle.cli", "rl", "branch", str(source), "--step", "2", "--dir", str(folder), "--json",
    ]  # fmt: skip


def test_the_model_directory_of_a_version_is_written_once_before_the_run(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(program.subprocess, "run", lambda words, check: done.append(words))
    words = ["RUN", "2", str(tmp_path / "start"), "rl", "run", "x.toml"]
    assert program.command_of(words)[3:] == ["rl", "run", "x.toml"]
    (tmp_path / "start").mkdir()
    assert program.command_of(words)[3:] == ["rl", "run", "x.toml"]
    assert [each[3:] for each in done] == [["rl", "export", "RUN", str(tmp_path / "start"), "--version", "2"]]


def test_the_page_of_versions_starts_a_run_from_one(hub, bob):
    run = bob.post("/api/v1/rft/runs", json=BODY).json()["run"]
    with_versions(hub, run, 1, 3)
    page = hub.signed_in("bob")
    shown = page.get(f"/training/{run['id']}").text
    assert "Start a run from v1" in shown
    assert "Start a run from v3" not in shown
    assert page.form(f"/training/{run['id']}", action="restart", step="1").status_code == 303
    (made, _) = bob.get("/api/v1/rft/runs").json()["runs"]
    assert made["name"].endswith("from v1")
    assert f'href="/training/{run["id"]}"' in page.get(f"/training/{made['id']}").text
    assert page.form(f"/training/{run['id']}", action="restart", step="x").status_code == 400
    assert hub.signed_in("eve").get(f"/training/{run['id']}").status_code == 404


@pytest.mark.nightly
@pytest.mark.e2e
def test_a_run_from_a_version_is_trained_to_its_end(hub, bob):
    queue = worker.QueueWorker(hub.lab)
    run = bob.post("/api/v1/rft/runs", json={**BODY, "max_steps": 4}).json()["run"]
    assert ended(bob, queue, run)["status"] == "COMPLETED"
    made = bob.put(f"/api/v1/rft/runs/{run['id']}/restart", params={"step": 3}).json()["run"]
    done = ended(bob, queue, made)
    assert (done["status"], done["errorMessage"]) == ("COMPLETED", None)
    assert [c["step"] for c in bob.get(f"/api/v1/rft/runs/{made['id']}/checkpoints").json()["checkpoints"]][-1] == 1
    queue.close()


def ended(client, queue, run):
    """The run when it is over."""
    for _ in range(3000):
        queue.step()
        now = client.get(f"/api/v1/rft/runs/{run['id']}").json()["run"]
        if now["status"] in jobs.OVER:
            return now
        time.sleep(0.1)
    raise AssertionError(f"{run['id']} has not ended: {now['status']}")


def test_the_page_queues_a_toml_and_says_what_is_wrong_with_one(hub):
    bob = hub.signed_in("bob")
    good = 'model = "tiny"\nmax_steps = 3\n[[env]]\nid = "reverse-text"\n'
    for text, words in (
        ("[[", "this is no TOML"),
        ("x = 1\n" + good, "not offered"),
        (good.replace("tiny", "x"), "not offered"),
    ):
        answer = bob.form("/training", toml=text)
        assert (answer.status_code, words in answer.text) == (400, True)
    assert bob.form("/training", toml=good).status_code == 303
    assert "reverse-text tiny" in bob.get("/training").text


@pytest.mark.e2e
def test_the_worker_of_a_second_server_waits_until_the_first_has_gone(hub, monkeypatch):
    begun = []
    monkeypatch.setattr(worker.QueueWorker, "_begin", lambda self, job: begun.append(job.id))
    run = hub.with_token("bob").post("/api/v1/rft/runs", json=BODY).json()["run"]
    hold = "import sys; from pathlib import Path; from mettle.storage.claim import FolderClaim; "
    hold += "c = FolderClaim(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", hold, str(hub.lab.folder / "runs")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout.readline() == b"held\n"
        second = worker.QueueWorker(hub.lab)
        second.step()
        assert begun == []
        first.kill()
    second.step()
    assert begun == [run["id"]]
    second.close()
