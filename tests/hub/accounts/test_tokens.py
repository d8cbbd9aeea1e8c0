"""Tokens: shown once, stored as a digest, closed by revoking, time, or their person being shut out."""

from __future__ import annotations

import pytest

from mettle.errors import UserError
from mettle.hub.accounts import people, tokens


def test_a_token_is_stored_as_a_digest_alone(hub):
    secret = hub.token("bob")
    hub.lab.database.engine.dispose()
    stored = b"".join(path.read_bytes() for path in hub.lab.folder.glob("hub.db*"))
    assert secret.encode() not in stored


def test_a_revoked_token_and_one_of_somebody_shut_out_open_nothing(hub):
    client = hub.with_token("bob")
    assert client.get("/api/v1/user/whoami").json()["data"]["slug"] == "bob"
    (token,) = client.get("/api/v1/tokens").json()["data"]
    assert client.delete(f"/api/v1/tokens/{token['id']}").status_code == 200
    assert client.get("/api/v1/user/whoami").status_code == 401
    eve = hub.with_token("eve")
    with hub.lab.database.write() as c:
        people.set_disabled(c, people.find_person(c, "eve").id, True)
    assert eve.get("/api/v1/user/whoami").status_code == 401


def test_a_token_runs_out(hub, monkeypatch):
    with hub.lab.database.write() as c:
        person = people.find_person(c, "bob")
        _, secret = tokens.create_token(c, person.id, "short", ["evals:read"], days=1)
        now = tokens.time.time()
        assert tokens.holder_of(c, secret) is not None
        monkeypatch.setattr(tokens.time, "time", lambda: now + 86401)
        assert tokens.holder_of(c, secret) is None


def test_a_token_makes_none_that_covers_more(hub):
    client = hub.with_token("bob", "account:write")
    asked = {"name": "more", "scopes": ["account:read", "environments:write"]}
    answer = client.post("/api/v1/tokens", json=asked)
    assert (answer.status_code, answer.json()["param"]) == (403, "environments:write")
    made = client.post("/api/v1/tokens", json={**asked, "scopes": ["account:read"]}).json()["data"]
    assert made["token"].startswith("mtl_")


@pytest.mark.parametrize("scopes", [[], ["everything"]])
def test_a_scope_that_there_is_not_is_refused(scopes):
    with pytest.raises(UserError, match="there are environments:read"):
        tokens.checked_scopes(scopes)
