"""Pushing results in the field's format, and what becomes of them: pages, leaderboard, comparison."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.hub.archives_made import push
from tests.hub.conftest import write_finished
from tests.hub.lab_writer import everything, room_for

from mettle.evals.entries import EvaluationEntry
from mettle.hub.evaluations import is_of

EVALS = "/api/v1/evaluations"


def samples(rewards, words="a word"):
    return [
        {
            "example_id": index, "prompt": [{"role": "user", "content": f"{words} {index}"}],
            "completion": [{"role": "assistant", "content": "an answer"}], "answer": "", "reward": reward,
            "metrics": {"exact": reward}, "task": "default", "info": {},
        } for index, reward in enumerate(rewards)
    ]  # fmt: skip


def evaluate(client, model, rewards, **more):
    body = {
        "name": f"x {model}",
        "environment": "bob/my-task",
        "model_name": model,
        "metadata": {"num_examples": 20},
        **more,
    }
    made = client.post(f"{EVALS}/", json=body)
    assert made.status_code == 201, made.text
    base = f"{EVALS}/{made.json()['evaluation_id']}"
    half = len(rewards) // 2
    for piece in (samples(rewards)[:half], samples(rewards)[half:]):
        assert client.post(f"{base}/samples", json={"samples": piece}).json()["samples_pushed"] == len(piece)
    done = client.post(f"{base}/finalize", json={"metrics": {"reward": 1}})
    assert done.status_code == 200, done.text
    return done.json()


@pytest.fixture
def bob(hub):
    client = hub.with_token("bob")
    assert push(client, visibility="PUBLIC").status_code == 200
    return client


GOOD, BAD = [1.0] * 18 + [0.0] * 2, [0.0] * 18 + [1.0] * 2


def test_what_is_pushed_is_measured_listed_and_opened(hub, bob):
    done = evaluate(bob, "good", GOOD, is_public=True)
    assert (done["status"], done["avg_score"], done["total_samples"]) == ("COMPLETED", 0.9, 20)
    assert done["ci_low"] < 0.9 < done["ci_high"]
    stranger = hub.anonymous()
    (row,) = stranger.get(f"{EVALS}/", params={"environment_name": "bob/my-task"}).json()["evaluations"]
    assert row["model_name"] == "good"
    page = stranger.get(f"{EVALS}/{row['id']}/samples", params={"limit": 8, "page": 3}).json()
    assert (len(page["samples"]), page["total_pages"], page["has_more"]) == (4, 3, False)
    assert page["samples"][0]["example_id"] == 16
    assert "good" in stranger.get(f"/evaluations/{row['id']}").text
    assert "a word 3" in stranger.get(f"/evaluations/{row['id']}/rollouts/3").text
    found = stranger.get(f"/evaluations/{row['id']}/rollouts", params={"words": "word 3"}).text
    assert f"/evaluations/{row['id']}/rollouts/3" in found
    assert f"/evaluations/{row['id']}/rollouts/4" not in found


def test_what_is_not_shared_is_its_owners(hub, bob):
    done = evaluate(bob, "good", GOOD)
    eve = hub.with_token("eve")
    for path in (f"{EVALS}/{done['id']}", f"{EVALS}/{done['id']}/samples", f"/evaluations/{done['id']}"):
        assert eve.get(path).status_code == 404
        assert bob.get(path).status_code == 200
    assert eve.get(f"{EVALS}/").json()["total"] == 0
    assert bob.put(f"{EVALS}/{done['id']}", json={"is_public": True}).json()["is_public"]
    assert eve.get(f"/evaluations/{done['id']}").status_code == 200
    assert eve.put(f"{EVALS}/{done['id']}", json={"name": "mine"}).status_code == 403
    assert eve.delete(f"{EVALS}/{done['id']}").status_code == 403
    assert bob.delete(f"{EVALS}/{done['id']}").status_code == 200
    assert list((hub.lab.folder / "results").iterdir()) == []


def test_models_are_ranked_and_compared_on_the_same_tasks(hub, bob):
    good, bad = (evaluate(bob, *each, is_public=True) for each in (("good", GOOD), ("bad", BAD)))
    places = hub.anonymous().get(f"{EVALS}/leaderboard", params={"environment": "bob/my-task"}).json()["places"]
    assert [(p["model_name"], p["place"]) for p in places] == [("good", "1"), ("bad", "2")]
    found = bob.post(f"{EVALS}/compare", json={"evaluation_ids": [bad["id"], good["id"]]}).json()
    assert found["num_tasks"] == 20
    assert found["pairs"][0]["difference"]["mean"] == pytest.approx(0.8)
    page = hub.anonymous().get("/compare", params={"e": [bad["id"], good["id"]]}).text
    assert "is best" in page
    assert hub.anonymous().get("/compare", params={"e": good["id"]}).status_code == 400
    assert "good" in hub.anonymous().get("/evaluations", params={"environment": "bob/my-task"}).text


def test_only_what_is_completed_shared_and_has_an_interval_stands_on_the_board(hub, bob):
    evaluate(bob, "shared", GOOD, is_public=True)
    evaluate(bob, "mine", GOOD)
    evaluate(bob, "of one task", [1.0], is_public=True)
    bob.post(f"{EVALS}/", json={"name": "x", "environment": "bob/my-task", "model_name": "running", "is_public": True})

    def models(client):
        places = client.get(f"{EVALS}/leaderboard", params={"environment": "bob/my-task"}).json()["places"]
        return {place["model_name"] for place in places}

    assert models(hub.anonymous()) == {"shared"}
    assert models(bob) == {"shared", "mine"}


def test_a_page_has_the_first_places_of_a_long_board_and_says_how_many_there_are(hub, bob, monkeypatch):
    monkeypatch.setattr("mettle.hub.routes.results_pages.MAX_SHOWN", 1)
    for each in (("good", GOOD), ("bad", BAD)):
        evaluate(bob, *each, is_public=True)
    text = hub.anonymous().get("/evaluations", params={"environment": "bob/my-task"}).text
    assert "The first 1 of 2 models" in text


def test_a_comparison_is_handed_over_as_one_file(hub, bob):
    pair = [evaluate(bob, *each, is_public=True)["id"] for each in (("<b>good", GOOD), ("bad", BAD))]
    stranger = hub.anonymous()
    page = stranger.get("/compare", params={"e": pair}).text
    (address,) = re.findall(r'href="(/compare/file[?]format=json[^"]*)"', page)
    answer = stranger.get(address.replace("&amp;", "&"))
    assert answer.headers["content-disposition"] == 'attachment; filename="comparison.json"'
    told = answer.json()
    assert [each["name"] for each in told["evaluations"]] == ["x <b>good", "x bad"]
    assert told["pairs"][0]["difference"]["mean"] == pytest.approx(-0.8)
    html = stranger.get("/compare/file", params={"e": pair, "format": "html"}).text
    assert "&lt;b&gt;good" in html
    assert "<b>good" not in html
    assert "| A |" in stranger.get("/compare/file", params={"e": pair, "format": "md"}).text
    assert str(hub.lab.folder) not in html + answer.text + page
    assert stranger.get("/compare/file", params={"e": pair, "format": "exe"}).status_code == 422
    mine = evaluate(bob, "mine", GOOD)["id"]
    assert stranger.get("/compare/file", params={"e": [*pair, mine]}).status_code == 404


def test_evaluations_of_this_machine_stand_on_the_leaderboard_by_themselves(hub, bob):
    from mettle.evals.imported import import_inspect_log

    write_finished(hub.lab.folder / "runs" / "done", steps=3, groups=2)
    evals = hub.lab.folder / "workspace" / "outputs" / "evals"
    import_inspect_log(Path(__file__).parents[2] / "evals" / "data" / "sums.eval", evals)
    assert push(bob, "reverse-text", visibility="PUBLIC").status_code == 200
    evaluate(bob, "pushed", [0.0] * 20, environment="bob/reverse-text", is_public=True)
    asked = {"environment": "bob/reverse-text"}
    places = hub.anonymous().get(f"{EVALS}/leaderboard", params=asked).json()["places"]
    local = [p for p in places if p["is_local"]]
    assert sorted(p["model_name"] for p in local) == ["done v0", "done v3"]
    assert [p["model_name"] for p in places if not p["is_local"]] == ["pushed"]
    assert all(p["interval"][0] <= p["mean"] <= p["interval"][1] for p in places)
    page = hub.anonymous().get("/evaluations", params=asked).text
    assert page.count(">this machine<") == 2
    assert "as reverse-text" in page
    assert f'href="/{local[0]["evaluation_id"]}"' in page
    assert hub.anonymous().get("/compare", params={"e": [p["evaluation_id"] for p in local]}).status_code == 200
    (sums,) = hub.anonymous().get(f"{EVALS}/leaderboard", params={"environment": "sums"}).json()["places"]
    assert (sums["model_name"], sums["is_local"], sums["num_tasks"]) == ("mockllm/model", True, 2)
    assert hub.anonymous().get(f"{EVALS}/leaderboard", params={"environment": "eve/other"}).json()["places"] == []
    hub.lab.are_runs_open = False
    hidden = hub.anonymous().get(f"{EVALS}/leaderboard", params=asked).json()["places"]
    assert [p["model_name"] for p in hidden] == ["pushed"]
    assert ">this machine<" not in hub.anonymous().get("/evaluations", params=asked).text
    assert hub.with_token("bob", "evals:read").get("/evaluations", params=asked).text.count(">this machine<") == 0


@pytest.mark.parametrize(
    ("own", "wanted", "is_one"),
    [("my_task", "ann/my-task", True), ("ann/my-task@0.1", "ann/my-task", True), ("ann/my-task", "my-task", True),
     ("eve/my-task", "ann/my-task", False), ("task", "ann/my-task", False)],
)  # fmt: skip
def test_an_evaluation_is_on_an_environment_as_far_as_names_say(own, wanted, is_one):
    assert is_of(EvaluationEntry(Path("x"), 0.0, {"env_id": own}), wanted) is is_one


def test_evaluations_of_this_machine_are_compared_by_whoever_sees_its_runs(hub, bob):
    write_finished(hub.lab.folder / "runs" / "done", steps=2, groups=2)
    page = bob.get("/runs/done/evals").text
    (query,) = re.findall(r'href="/compare[?]([^"]*)"', page)
    address = f"/compare?{query.replace('&amp;', '&')}"
    answer = bob.get(address)
    assert answer.status_code == 200
    assert answer.text.count(">this machine<") == 2
    first = re.search(r"e=(runs/done/evals/[0-9]+)", address)[1]
    assert bob.get(f"/{first}").status_code == 200
    hub.lab.are_runs_open = False
    assert hub.anonymous().get(address).status_code == 404
    assert bob.get(address).status_code == 200
    assert hub.with_token("bob", "evals:read").get(address).status_code == 404
    for wrong in ("runs/none/evals/1", "runs/done/evals/99", "../hub.db", "a~b", f"runs/{'c' + 'a' * 24}/evals/1"):
        assert bob.get("/compare", params={"e": [first, wrong]}).status_code == 404, wrong


def test_a_completed_evaluation_does_not_change_and_a_bad_one_is_refused(bob):
    done = evaluate(bob, "good", GOOD)
    assert bob.post(f"{EVALS}/{done['id']}/samples", json={"samples": samples([1.0])}).status_code == 409
    assert bob.post(f"{EVALS}/", json={"name": "x", "environments": [{"id": "none"}]}).status_code == 404
    assert bob.post(f"{EVALS}/", json={"name": "x", "environment": "eve/none"}).status_code == 404
    assert bob.post(f"{EVALS}/", json={"name": ""}).status_code == 400
    assert bob.post(f"{EVALS}/", json={"name": "x", "team_id": "robots"}).status_code == 403


def test_a_piece_that_was_cut_off_does_not_count(hub, bob):
    made = bob.post(f"{EVALS}/", json={"name": "x", "environment": "words", "model_name": "m"}).json()
    base = f"{EVALS}/{made['id']}"
    bob.post(f"{base}/samples", json={"samples": samples([1.0, 1.0])})
    file = hub.lab.folder / "results" / made["id"] / "results.jsonl"
    with file.open("ab") as half:
        half.write(b'{"example_id": 2, "rew')  # a kill in the middle of a write, before its transaction
    bob.post(f"{base}/samples", json={"samples": samples([0.0, 0.0])[1:]})
    with file.open("ab") as half:
        half.write(b"{")
    done = bob.post(f"{base}/finalize", json={}).json()
    assert (done["total_samples"], done["avg_score"]) == (3, pytest.approx(0.75))


def test_on_a_full_disk_a_piece_is_refused_whole(hub, bob, monkeypatch):
    made = bob.post(f"{EVALS}/", json={"name": "x", "environment": "words", "model_name": "m"}).json()
    before = everything(hub.lab.database)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("mettle.hub.results.pushed.os.fsync", full)
        answer = bob.post(f"{EVALS}/{made['id']}/samples", json={"samples": samples([1.0])})
    assert (answer.status_code, "no space left" in answer.json()["detail"]) == (503, True)
    assert everything(hub.lab.database) == before
    with room_for(hub.lab.database, 0):
        assert bob.post(f"{EVALS}/{made['id']}/samples", json={"samples": samples([1.0])}).status_code in (200, 503)
