"""Names, origins and secrets."""

from __future__ import annotations

import pytest

from mettle.web.doors import Door, allowed_hosts, bearer, host_name, is_same_secret, secret_digest
from mettle.web.keys import Keys
from mettle.web.problems import HttpError


@pytest.mark.parametrize(
    ("header", "name"),
    [("localhost", "localhost"), ("LOCALHOST:1", "localhost"), ("[::1]:80", "::1"), ("127.0.0.1:7", "127.0.0.1"), ("", "")],
)  # fmt: skip
def test_the_name_in_a_host_header(header, name):
    assert host_name(header) == name


def test_a_server_on_the_loopback_answers_to_its_names_and_those_it_is_told():
    assert allowed_hosts("0.0.0.0") is None
    assert allowed_hosts("127.0.0.9", ["lab"]) == {"localhost", "127.0.0.1", "::1", "127.0.0.9", "lab"}
    door = Door(allowed_hosts("localhost", ["lab"]), max_body_bytes=10)
    assert door.refusal(asked(host="lab:80")) is None
    assert door.refusal(asked(host="lab:80", **{"content-length": "11"})).status == 413
    assert Door(allowed_hosts("localhost")).refusal(asked()).status == 400


@pytest.mark.parametrize(
    ("keys", "access", "given", "status"),
    [
        (Keys(), "key", "", 200),
        (Keys(), "admin", "", 403),
        (Keys(), "admin", "anything", 403),
        (Keys(api="a"), "anybody", "", 200),
        (Keys(api="a"), "key", "", 401),
        (Keys(api="a"), "key", "b", 401),
        (Keys(api="a"), "key", "a", 200),
        (Keys(api="a"), "admin", "a", 403),
        (Keys(api="a", admin="r"), "admin", "", 401),
        (Keys(api="a", admin="r"), "admin", "a", 401),
        (Keys(api="a", admin="r"), "admin", "r", 200),
        (Keys(api="a", admin="r"), "key", "r", 200),
        (Keys(admin="r"), "key", "", 200),
    ],
)
def test_a_route_is_for_those_who_have_its_secret(keys, access, given, status):
    scope = asked(**({"authorization": f"Bearer {given}"} if given else {}))
    if status == 200:
        Door(None, keys).admit(access, scope)
        return
    with pytest.raises(HttpError) as refused:
        Door(None, keys).admit(access, scope)
    assert refused.value.status == status


def test_a_process_keeps_the_admin_key_from_its_children(monkeypatch):
    made = Keys.new()
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    assert Keys.from_environment() == made
    assert Keys.from_environment() == Keys(api=made.api)


def asked(**headers):
    return {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]}


@pytest.mark.parametrize(
    ("header", "secret"),
    [("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("Basic abc", ""), ("abc", ""), ("", "")],
)
def test_the_secret_of_a_bearer_header(header, secret):
    assert bearer({"authorization": header}) == secret


def test_secrets_are_compared_whatever_they_hold():
    assert is_same_secret("\u00fc\ud800", "\u00fc\ud800")
    assert not is_same_secret("", "x")
    assert secret_digest("a") != secret_digest("b")
