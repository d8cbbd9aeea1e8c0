"""Pushing, reading, forking, yanking and deleting environments; versions never change."""

from __future__ import annotations

import hashlib

import pytest
from tests.hub.archives_made import push, source, wheel
from tests.hub.lab_writer import everything, room_for

HUB = "/api/v1/environmentshub"


@pytest.fixture
def bob(hub):
    return hub.with_token("bob")


def test_what_is_pushed_is_there_and_stays_as_it_is(hub, bob):
    assert push(bob, visibility="PUBLIC").json()["data"]["success"]
    found = hub.anonymous().get(f"{HUB}/bob/my-task/@latest").json()["data"]
    assert (found["semantic_version"], found["visibility"], found["tags"]) == ("0.1.0", "PUBLIC", ["text"])
    data = hub.anonymous().get(found["wheel_url"]).content
    assert data == wheel()
    assert hashlib.sha256(data).hexdigest() == found["sha256"]
    assert hub.anonymous().get(found["package_url"]).content == source()
    again = push(bob)
    assert (again.status_code, again.json()["code"]) == (409, "exists")
    assert "content hash" in again.json()["detail"]
    assert "already exists" in again.json()["detail"]
    other = push(bob, source_bytes=source(files={"more.py": b"1"}))
    assert other.status_code == 409
    assert "versions never change" in other.json()["detail"]


def test_a_visibility_that_is_asked_for_is_obeyed_for_what_is_there_already(hub, bob):
    push(bob)
    stranger = hub.anonymous()
    assert stranger.get(f"{HUB}/bob/my-task/@latest").status_code == 404
    push(bob, version="0.2.0", visibility="PUBLIC")
    assert stranger.get(f"{HUB}/bob/my-task/@latest").status_code == 200
    push(bob, version="0.3.0")
    assert stranger.get(f"{HUB}/bob/my-task/@0.3.0").status_code == 200
    push(bob, version="0.4.0", visibility="private")
    assert stranger.get(f"{HUB}/bob/my-task/@latest").status_code == 404
    assert push(bob, version="0.5.0", visibility="secret").status_code == 422


def test_a_member_pushes_and_only_an_admin_of_the_team_changes_who_sees_it(hub, bob):
    hub.team("robots", "bob", "eve")
    eve = hub.with_token("eve")
    assert push(eve, owner_slug="robots").status_code == 200
    refused = push(eve, version="0.2.0", owner_slug="robots", visibility="PUBLIC")
    assert refused.status_code == 403
    assert push(bob, version="0.2.0", owner_slug="robots", visibility="PUBLIC").status_code == 200
    assert push(bob, owner_slug="eve").status_code == 403
    assert push(bob, owner_slug="nobody").status_code == 403


def test_the_bytes_that_come_are_those_that_were_announced(hub, bob):
    body = {
        "content_hash": "0" * 64, "filename": "my_task-0.1.0-py3-none-any.whl", "size": 10,
        "sha256": hashlib.sha256(wheel()).hexdigest(), "semantic_version": "0.1.0",
    }  # fmt: skip
    environment = bob.post(f"{HUB}/resolve", json={"name": "my-task"}).json()["data"]["id"]
    told = bob.post(f"{HUB}/{environment}/wheels", json=body).json()["data"]
    assert bob.put(told["upload_url"], content=b"0123456789").status_code == 400
    assert bob.put(told["upload_url"], content=wheel()).status_code == 413
    assert bob.put("/api/v1/uploads/nothing", content=b"").status_code == 404
    assert bob.post(f"{HUB}/{environment}/wheels/{told['wheel_id']}/finalize").status_code == 409
    assert list(hub.lab.blobs.folder.rglob("*/*")) == []
    wrong = bob.post(f"{HUB}/{environment}/wheels", json={**body, "filename": "other-0.1.0-py3-none-any.whl"})
    assert wrong.status_code == 400


def test_a_hostile_archive_is_refused_and_nothing_is_seen(hub, bob):
    refused = push(bob, visibility="PUBLIC", wheel_bytes=wheel(files={"../evil": b""}))
    assert (refused.status_code, "leads out" in refused.json()["detail"]) == (400, True)
    assert push(bob, source_bytes=source(files={"README.md": b""})).status_code == 400
    assert hub.anonymous().get(f"{HUB}/").json()["total_count"] == 0
    assert push(bob, visibility="PUBLIC").status_code == 200


def test_a_yanked_version_is_the_newest_no_more_and_is_found_by_name(bob):
    push(bob)
    push(bob, version="0.2.0")
    assert bob.post(f"{HUB}/bob/my-task/@0.2.0/yank", json={"reason": "wrong"}).status_code == 200
    assert bob.get(f"{HUB}/bob/my-task/@latest").json()["data"]["semantic_version"] == "0.1.0"
    assert bob.get(f"{HUB}/bob/my-task/@0.2.0").json()["data"]["yanked_reason"] == "wrong"
    bob.post(f"{HUB}/bob/my-task/@0.2.0/yank", json={"reason": None})
    assert bob.get(f"{HUB}/bob/my-task/@latest").json()["data"]["semantic_version"] == "0.2.0"


def test_the_number_of_a_deleted_version_stays_taken(bob):
    push(bob)
    assert bob.delete(f"{HUB}/bob/my-task/@0.1.0").status_code == 200
    assert bob.get(f"{HUB}/bob/my-task/@0.1.0").status_code == 404
    assert "versions never change" in push(bob, source_bytes=source(files={"x": b"1"})).json()["detail"]
    assert bob.delete(f"{HUB}/bob/my-task").status_code == 200
    assert bob.get(f"{HUB}/bob/my-task/status").status_code == 404


def test_a_fork_is_ones_own(hub, bob):
    push(bob, visibility="PUBLIC")
    eve = hub.with_token("eve")
    made = eve.post(f"{HUB}/bob/my-task/fork", json={}).json()["data"]
    assert made["slug"] == "eve/my-task"
    assert eve.get(f"{HUB}/eve/my-task/@latest").json()["data"]["forked_from"] == "bob/my-task@0.1.0"
    assert eve.post(f"{HUB}/bob/my-task/fork", json={}).status_code == 409
    assert push(eve, version="0.2.0").status_code == 200


def test_stars_words_tags_and_pages(hub, bob):
    push(bob, visibility="PUBLIC")
    push(bob, "other-task", visibility="PUBLIC")
    eve = hub.with_token("eve")
    assert eve.put(f"{HUB}/bob/other-task/star").status_code == 200
    assert eve.put(f"{HUB}/bob/other-task/star").status_code == 200

    def names(**params):
        return [e["name"] for e in eve.get(f"{HUB}/", params=params).json()["data"]]

    assert names(sort_by="stars") == ["other-task", "my-task"]
    assert names(starred_only=True) == ["other-task"]
    assert names(search="OTHER") == ["other-task"]
    assert names(search="what it is", limit=1, sort_by="name", sort_order="asc") == ["my-task"]
    assert names(tags="text", offset=1, sort_by="name", sort_order="asc") == ["other-task"]
    assert names(tags="none") == []
    assert names(mine_only=True) == []
    eve.delete(f"{HUB}/bob/other-task/star")
    assert names(starred_only=True) == []


def test_files_are_looked_at_without_downloading(bob):
    push(bob, source_bytes=source(files={"a/b/c.txt": b"hello"}))
    root = bob.get(f"{HUB}/bob/my-task/@latest/inspect").json()["data"]
    assert {e["name"]: e["is_directory"] for e in root["entries"]}["a"] is True
    inner = bob.get(f"{HUB}/bob/my-task/@latest/inspect", params={"path": "a/b"}).json()["data"]
    assert inner["entries"] == [{"name": "c.txt", "path": "a/b/c.txt", "is_directory": False, "size": 5}]
    file = bob.get(f"{HUB}/bob/my-task/@latest/inspect", params={"path": "a/b/c.txt", "max_bytes": 4}).json()["data"]
    assert (file["content"], file["truncated"], file["total_bytes"]) == ("hell", True, 5)
    assert bob.get(f"{HUB}/bob/my-task/@latest/inspect", params={"path": "../x"}).status_code == 404


def test_on_a_full_disk_a_push_fails_in_one_line_and_goes_through_later(hub, bob, monkeypatch):
    bob.post(f"{HUB}/resolve", json={"name": "my-task"})
    before = everything(hub.lab.database)
    long = wheel(extra="X-Filler: " + "x" * 200_000)
    with room_for(hub.lab.database, 5):
        refused = push(bob, wheel_bytes=long)
    assert refused.status_code == 503
    assert "\n" not in refused.json()["detail"]
    assert hub.with_token("bob").get(f"{HUB}/bob/my-task/versions").json()["data"]["versions"] == []
    assert everything(hub.lab.database)["environments"] == before["environments"]

    def full(path, *args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("mettle.storage.blobs.os.fsync", full)
        assert push(bob).status_code == 503
    assert push(bob, wheel_bytes=long).status_code == 200
