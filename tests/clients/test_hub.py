"""The client of a Hub: where tokens are kept and sent, and what it says of a Hub that refuses or is silent."""

from __future__ import annotations

import httpx
import pytest

from mettle.clients.hub import HubClient
from mettle.clients.hub_contexts import Contexts, HubContext, checked_url
from mettle.errors import ServiceError, UserError


@pytest.fixture
def saved(tmp_path):
    contexts = Contexts(tmp_path / "mettle" / "hub.json")
    contexts.saved["default"] = HubContext("https://hub.test", "mtl_secret", "ann")
    contexts.save()
    return contexts.path


def test_contexts_are_read_back_and_are_for_their_user_alone(saved):
    found = Contexts.load(saved)
    assert found.active == HubContext("https://hub.test", "mtl_secret", "ann")
    assert saved.stat().st_mode & 0o077 == 0
    assert "mtl_secret" not in repr(found)


def test_the_environment_goes_first_and_a_saved_token_stays_with_its_address(saved, monkeypatch):
    monkeypatch.setenv("METTLE_HUB_URL", "https://other.test/api/v1/")
    assert Contexts.load(saved).active == HubContext("https://other.test")
    monkeypatch.setenv("METTLE_API_KEY", "mtl_other")
    assert Contexts.load(saved).active.token == "mtl_other"


@pytest.mark.parametrize("url", ["", "ftp://hub", "http://", "http://me:secret@hub", "http://hub:99999"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(UserError, match="is no address of a Hub"):
        checked_url(url)


def test_a_damaged_file_is_named(saved):
    saved.write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        Contexts.load(saved)


def client(handler):
    return HubClient(HubContext("https://hub.test", "mtl_x"), transport=httpx.MockTransport(handler))


def test_a_refusal_is_one_line():
    answers = iter([
        httpx.Response(401, json={"detail": "no such token"}),
        httpx.Response(422, json={"detail": [{"loc": ["body", "name"], "msg": "is missing"}]}),
        httpx.Response(500, text="broken"),
    ])  # fmt: skip
    with client(lambda request: next(answers)) as hub:
        for words in ("no such token; `mettle login`", "body.name: is missing", "HTTP 500"):
            with pytest.raises(UserError, match=words):
                hub.get("/user/whoami")


def test_a_hub_that_is_silent_or_is_none_is_said_so():
    def refuse(request):
        raise httpx.ConnectTimeout("timed out")

    with client(refuse) as hub, pytest.raises(ServiceError, match=r"no answer from the Hub at https://hub.test"):
        hub.get("/user/whoami")
    answers = client(lambda request: httpx.Response(200, text="<html>"))
    with answers as hub, pytest.raises(ServiceError, match="not as a Hub does"):
        hub.get("/user/whoami")
