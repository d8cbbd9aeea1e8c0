"""`mettle login` and the commands around it, against a Hub in this process."""

from __future__ import annotations

import io
import json

import pytest
from tests.hub.lab_writer import HubWriter, InProcess

from mettle.cli import account
from mettle.clients import hub as client_module


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub that every client of this process reaches, and a home of its own for what is saved."""
    made = HubWriter(tmp_path / "hub")
    made.person("bob")
    made.team("robots", "bob")
    transport = InProcess(made.anonymous())

    class Here(client_module.HubClient):
        def __init__(self, context):
            super().__init__(context, transport=transport)

    monkeypatch.setattr(account, "HubClient", Here)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("METTLE_API_KEY", "METTLE_HUB_URL"):
        monkeypatch.delenv(name, raising=False)
    yield made
    made.close()


def sign_in(mettle, hub, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(hub.token("bob") + "\n"))
    return mettle("login", "http://hub.test", "--token")


def test_from_signing_in_to_signing_out(mettle, hub, monkeypatch):
    assert mettle("whoami").err.startswith("error: not signed in at http://127.0.0.1:7860: `mettle login")
    assert sign_in(mettle, hub, monkeypatch).out.startswith("signed in at http://hub.test as bob\n")
    assert json.loads(mettle("whoami", "--json").out)["slug"] == "bob"
    assert json.loads(mettle("teams", "--json").out)[0]["role"] == "ADMIN"
    assert mettle("switch", "robots").out == "acting as robots\n"
    assert json.loads(mettle("config", "view", "--json").out)[0]["team"] == "robots"
    assert "you are in no team 'cats'; there are robots" in mettle("switch", "cats").err
    assert mettle("config", "use", "elsewhere").code == 2
    assert mettle("logout").code == 0
    assert mettle("logout").code == 2


def test_a_wrong_token_is_refused_and_not_saved(mettle, hub, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("mtl_wrong\n"))
    ended = mettle("login", "http://hub.test", "--token")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "this token opens nothing" in ended.err
    assert mettle("config", "view").out.startswith("signed in at no Hub")


def test_the_browsers_way_in(mettle, hub, monkeypatch):
    bob, opened = hub.signed_in("bob"), []

    def approve(page):
        opened.append(page)
        assert bob.form("/dashboard/tokens/challenge", code=page.rpartition("=")[2]).status_code == 200

    monkeypatch.setattr("click.launch", approve)
    assert mettle("login", "http://hub.test").out.splitlines()[-2] == "signed in at http://hub.test as bob"
    assert opened[0].startswith("http://hub.test/dashboard/tokens/challenge?code=")
