"""Signing in and out, joining by a link, forms of other sessions, a terminal's sign-in."""

from __future__ import annotations

import re

import pytest
from tests.hub.lab_writer import PASSWORD, HubWriter, everything, room_for

from mettle.hub.lab import open_lab


def test_the_first_link_makes_an_admin_once(tmp_path):
    hub = HubWriter(tmp_path)
    secret = hub.lab.first_link()
    fields = {"username": "ann", "password": PASSWORD, "again": PASSWORD}
    browser = hub.anonymous()
    assert "first admin" in browser.get(f"/join/{secret}").text
    assert browser.post(f"/join/{secret}", data={**fields, "again": "another one"}).status_code == 400
    answer = browser.post(f"/join/{secret}", data=fields)
    assert "admin of this Hub" in answer.text
    assert hub.lab.first_link() is None
    assert hub.anonymous().post(f"/join/{secret}", data={**fields, "username": "eve"}).status_code == 400
    hub.close()


def test_a_hub_opens_twice_with_what_it_kept(tmp_path):
    first = open_lab(tmp_path / "hub")
    assert first.first_link() is not None
    first.close()
    assert (tmp_path / "hub").stat().st_mode & 0o077 == 0
    again = open_lab(tmp_path / "hub")
    again.close()


def test_a_wrong_password_and_a_name_that_nobody_has_look_the_same(hub):
    answers = [
        hub.anonymous().post("/signin", data={"username": name, "password": "wrong wrong"})
        for name in ("bob", "nobody")
    ]
    assert [a.status_code for a in answers] == [401, 401]
    assert answers[0].text.replace('value="bob"', "") == answers[1].text.replace('value="nobody"', "")


def test_who_tries_too_often_waits(hub):
    client = hub.anonymous()
    answers = [client.post("/signin", data={"username": "bob", "password": "wrong wrong"}) for _ in range(12)]
    assert answers[-1].status_code == 429
    assert int(answers[-1].headers["Retry-After"]) >= 1


def test_signing_out_closes_the_session(hub):
    bob = hub.signed_in("bob")
    cookie = bob.cookies["mettle_session"]
    assert bob.form("/signout").status_code == 303
    again = hub.anonymous()
    again.cookies["mettle_session"] = cookie
    assert again.get("/account", follow_redirects=False).headers["location"] == "/signin?next=%2Faccount"


@pytest.mark.parametrize("target", ["//evil.test", "https://evil.test", "/\\evil.test", "/a b", "evil"])
def test_signing_in_leads_nowhere_else(hub, target):
    sent = {"username": "bob", "password": PASSWORD, "next": target}
    answer = hub.anonymous().post("/signin", data=sent, follow_redirects=False)
    assert answer.headers["location"] == "/"


def test_a_form_without_the_word_of_its_session_does_nothing(hub):
    bob, eve = hub.signed_in("bob"), hub.signed_in("eve")
    before = everything(hub.lab.database)
    for word in ("", "wrong", eve.csrf):
        sent = {"csrf": word, "slug": "robbers"}
        assert bob.post("/teams", data=sent).status_code == 403
    headers = {"X-CSRF-Token": ""}
    assert bob.post("/api/v1/teams", json={"slug": "robbers"}, headers=headers).status_code == 403
    assert bob.post("/api/v1/teams", data={"slug": "robbers"}, headers=headers).status_code == 403
    assert everything(hub.lab.database) == before
    assert bob.form("/teams", slug="friends").status_code == 303


def test_a_token_is_shown_once(hub):
    bob = hub.signed_in("bob")
    page = bob.form("/account/tokens", name="laptop", scopes="evals:read").text
    secret = re.search(r"mtl_[\w-]+", page)[0]
    assert "mtl_" not in bob.get("/account").text
    client = hub.anonymous()
    assert client.get("/api/v1/user/whoami", headers={"Authorization": f"Bearer {secret}"}).status_code == 200


def test_another_password_ends_the_other_sessions(hub):
    here, elsewhere = hub.signed_in("bob"), hub.signed_in("bob")
    assert here.form("/account/password", password="wrong", new="another password").status_code == 400
    assert here.form("/account/password", password=PASSWORD, new="another password").status_code == 303
    assert here.get("/account", follow_redirects=False).status_code == 200
    assert elsewhere.get("/account", follow_redirects=False).status_code == 303


def test_a_terminal_is_signed_in_by_a_browser(hub):
    terminal, bob = hub.anonymous(), hub.signed_in("bob")
    asked = terminal.post("/api/v1/auth_challenge/generate", json={}).json()
    status, headers = "/api/v1/auth_challenge/status", {"Authorization": f"Bearer {asked['status_auth_token']}"}
    params = {"challenge": asked["challenge"]}
    assert terminal.get(status, params=params, headers=headers).json() == {"result": None}
    assert asked["challenge"] in bob.get("/dashboard/tokens/challenge", params={"code": asked["challenge"]}).text
    assert bob.form("/dashboard/tokens/challenge", code=asked["challenge"]).status_code == 200
    thief = {"Authorization": "Bearer sat_other"}
    assert terminal.get(status, params=params, headers=thief).status_code == 404
    token = terminal.get(status, params=params, headers=headers).json()["result"]
    assert terminal.get(status, params=params, headers=headers).status_code == 404
    me = terminal.get("/api/v1/user/whoami", headers={"Authorization": f"Bearer {token}"}).json()
    assert me["data"]["slug"] == "bob"


def test_beyond_loopback_runs_are_for_people_with_an_account(tmp_path):
    hub = HubWriter(tmp_path, are_runs_open=False)
    hub.person("bob")
    stranger = hub.anonymous()
    assert stranger.get("/", follow_redirects=False).status_code == 303
    assert stranger.get("/api/v1/runs").status_code == 401
    assert hub.signed_in("bob").get("/api/v1/runs").json() == {"runs": []}
    assert hub.with_token("bob", "evals:read").get("/api/v1/runs").status_code == 403
    hub.close()


def test_on_a_full_disk_a_request_is_a_503_and_keeps_nothing(hub):
    bob = hub.signed_in("bob")
    before = everything(hub.lab.database)
    for _ in range(200):  # until the page with room is full
        with room_for(hub.lab.database, 0):
            answer = bob.form("/account/tokens", name="n" * 100, scopes="evals:read training:write account:read")
        if answer.status_code == 503:
            break
        before = everything(hub.lab.database)
    assert answer.status_code == 503
    assert "free some space" in answer.text
    assert everything(hub.lab.database) == before
    assert bob.form("/account/tokens", name="there is room again", scopes="evals:read").status_code == 200
