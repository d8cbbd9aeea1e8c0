"""Keys and links: who is who, and what a link opens."""

from __future__ import annotations

import pytest

from mettle.errors import UserError
from mettle.trainer.service.access import Signer, TenantKeys, new_key
from mettle.web.problems import HttpError


def test_without_a_file_each_key_is_an_owner_and_none_is_told_by_its_name():
    keys, first, second = TenantKeys.read(None), new_key(), new_key()
    owners = {keys.owner({"x-api-key": key}) for key in (first, second, first)}
    assert len(owners) == 2
    assert not any(first in owner or second in owner for owner in owners)


@pytest.mark.parametrize("text", ["", "# nothing\n", "sk-1 ann\n", "tml-1\n", "tml-1 ann b\n"])
def test_a_file_without_keys_is_one_line(tmp_path, text):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(UserError, match="keys"):
        TenantKeys.read(tmp_path / "keys")


def test_only_the_keys_of_the_file_open(tmp_path):
    (tmp_path / "keys").write_text("tml-1 ann\ntml-2 ben\n")
    keys = TenantKeys.read(tmp_path / "keys")
    assert keys.owner({"x-api-key": "tml-2"}) == "ben"
    for headers in ({}, {"x-api-key": "tml-3"}, {"authorization": "Bearer tml-1"}):
        with pytest.raises(HttpError) as refused:
            keys.owner(headers)
        assert refused.value.status == 401


@pytest.mark.parametrize("name", ["x-api-key", "authorization"])
def test_a_token_of_the_hosted_service_is_told_what_it_is(name):
    token = "eyJhbGciOiJSUzI1NiJ9.eyJleHAiOjF9.c2ln"
    with pytest.raises(HttpError, match=r"JWT.*hosted.*mettle train key NAME") as refused:
        TenantKeys.read(None).owner({name: token if name == "x-api-key" else f"Bearer {token}"})
    assert refused.value.status == 401
    assert token not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_link_opens_its_file_until_it_ends(tmp_path):
    now = [1000.0]
    signer = Signer(tmp_path / "secret", lambda: now[0])
    expires, _, signature = signer.signed("a/b")[0].partition("/")
    signer.check("a/b", expires, signature)
    for what, until, sign in (("a/c", expires, signature), ("a/b", str(int(expires) + 1), signature), ("a/b", "x", "")):
        with pytest.raises(HttpError):
            signer.check(what, until, sign)
    now[0] = float(expires) + 1
    with pytest.raises(HttpError, match="ended"):
        signer.check("a/b", expires, signature)
    assert (tmp_path / "secret").stat().st_mode & 0o77 == 0
