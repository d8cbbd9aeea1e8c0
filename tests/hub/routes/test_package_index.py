"""The simple index: what pip reads, who may read it, and that a private name is never looked for elsewhere."""

from __future__ import annotations

import base64
import hashlib

import pytest
from tests.hub.archives_made import push, wheel

JSON = {"Accept": "application/vnd.pypi.simple.v1+json"}


@pytest.fixture
def bob(hub):
    return hub.with_token("bob")


def test_both_forms_name_hashes_metadata_and_yanks(hub, bob):
    push(bob, visibility="PUBLIC")
    push(bob, version="0.2.0")
    bob.post("/api/v1/environmentshub/bob/my-task/@0.1.0/yank", json={"reason": 'say "why"'})
    stranger = hub.anonymous()
    for path in ("/owners/bob/simple/", "/simple/"):
        assert '<a href="my-task/">' in stranger.get(path).text
        assert stranger.get(path, headers=JSON).json()["projects"] == [{"name": "my-task"}]
        html = stranger.get(f"{path}My_Task/").text
        sha256 = hashlib.sha256(wheel()).hexdigest()
        assert f"/packages/bob/my-task/0.1.0/my_task-0.1.0-py3-none-any.whl#sha256={sha256}" in html
        assert 'data-yanked="say &quot;why&quot;"' in html
        found = stranger.get(f"{path}my-task/", headers=JSON)
        assert found.headers["content-type"] == "application/vnd.pypi.simple.v1+json"
        files = {f["filename"]: f for f in found.json()["files"]}
        one = files["my_task-0.1.0-py3-none-any.whl"]
        assert (one["yanked"], one["requires-python"]) == ('say "why"', ">=3.11")
        assert files["my_task-0.2.0-py3-none-any.whl"]["yanked"] is False
        metadata = stranger.get(f"{one['url']}.metadata").content
        assert hashlib.sha256(metadata).hexdigest() == one["core-metadata"]["sha256"]
        assert stranger.get(one["url"]).content == wheel()


def test_a_private_package_wants_a_token_which_pip_sends_as_a_password(hub, bob):
    push(bob)
    for path in ("/owners/bob/simple/my-task/", "/simple/my-task/"):
        assert hub.anonymous().get(path).status_code == 404
        assert hub.with_token("eve").get(path).status_code == 404
        client = hub.anonymous()
        secret = base64.b64encode(f"token:{hub.token('bob', 'environments:read')}".encode()).decode()
        assert client.get(path, headers={"Authorization": f"Basic {secret}"}).status_code == 200
        wrong = base64.b64encode(b"token:mtl_wrong").decode()
        assert client.get(path, headers={"Authorization": f"Basic {wrong}"}).status_code == 401
        assert client.get(path, headers={"Authorization": "Basic !"}).status_code == 401
    assert hub.anonymous().get("/packages/bob/my-task/0.1.0/source.tar.gz").status_code == 404


def test_a_name_of_this_hub_is_never_looked_for_elsewhere(hub, bob):
    hub.lab.upstream_index = "https://index.test/simple/"
    push(bob)  # private
    push(hub.with_token("eve"), visibility="PUBLIC", version="9.9.9")  # the same name, later and higher
    stranger = hub.anonymous()
    elsewhere = stranger.get("/simple/numpy/", follow_redirects=False)
    assert elsewhere.headers["location"] == "https://index.test/simple/numpy/"
    assert stranger.get("/simple/my-task/", follow_redirects=False).status_code == 404
    assert stranger.get("/owners/bob/simple/my-task/", follow_redirects=False).status_code == 404
    assert stranger.get("/owners/nobody/simple/my-task/", follow_redirects=False).status_code == 404
    files = bob.get("/simple/my-task/", headers=JSON).json()["files"]
    assert [f["filename"] for f in files] == ["my_task-0.1.0-py3-none-any.whl"]
    assert stranger.get("/simple/", headers=JSON).json()["projects"] == []
    hub.lab.upstream_index = ""
    assert stranger.get("/simple/numpy/", follow_redirects=False).status_code == 404
