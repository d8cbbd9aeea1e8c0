"""Teams by their pages, and what only admins see."""

from __future__ import annotations

import re

from tests.hub.lab_writer import PASSWORD


def test_a_team_is_made_joined_by_a_link_and_left(hub):
    bob = hub.signed_in("bob")
    assert bob.form("/teams", slug="robots", name="The Robots").headers["location"] == "/teams/robots"
    link = re.search(r"http://hub.test(/join/[\w-]+)", bob.form("/teams/robots/invite").text)[1]
    fields = {"username": "kim", "password": PASSWORD, "again": PASSWORD}
    assert hub.anonymous().post(link, data=fields).status_code == 200
    kim = hub.signed_in("kim")
    assert "The Robots" in kim.get("/teams").text
    assert kim.form("/teams/robots/members", username="eve", role="MEMBER").status_code == 403
    assert kim.form("/teams/robots/members", username="kim").headers["location"] == "/teams"
    assert kim.get("/teams/robots").status_code == 404


def test_a_team_keeps_an_admin(hub):
    hub.team("robots", "bob", "eve")
    bob = hub.signed_in("bob")
    assert "at least one admin" in bob.form("/teams/robots/members", username="bob").text
    assert bob.form("/teams/robots/members", username="eve", role="ADMIN").status_code == 303
    assert bob.form("/teams/robots/members", username="bob").status_code == 303


def test_people_and_the_audit_log_are_for_admins(hub):
    ann, bob = hub.signed_in("ann"), hub.signed_in("bob")
    for path in ("/people", "/audit"):
        assert bob.get(path).status_code == 403
        assert hub.with_token("ann").get(path).status_code == 403
    assert "session.open" in ann.get("/audit").text
    bobs = re.search(
        r'action="(/people/\w+)"[^<]*<[^<]*<button[^>]*aria-label="Shut out: bob"', ann.get("/people").text
    )[1]
    assert ann.form(bobs, action="disable").status_code == 303
    assert bob.get("/teams", follow_redirects=False).status_code == 303
    anns = re.search(
        r'action="(/people/\w+)"[^<]*<[^<]*<button[^>]*aria-label="Shut out: ann"', ann.get("/people").text
    )[1]
    assert "last admin" in ann.form(anns, action="disable").text


def test_a_name_is_one_persons_or_one_teams(hub):
    answer = hub.signed_in("bob").form("/teams", slug="eve")
    assert answer.status_code == 400
    assert "already taken" in answer.text
