"""Names, origins and secrets."""

from __future__ import annotations

import pytest

from mettle.web.doors import allowed_hosts, bearer, host_name, is_same_secret, refused_host, secret_digest


@pytest.mark.parametrize(
    ("header", "name"),
    [("localhost", "localhost"), ("LOCALHOST:1", "localhost"), ("[::1]:80", "::1"), ("127.0.0.1:7", "127.0.0.1"), ("", "")],
)  # fmt: skip
def test_the_name_in_a_host_header(header, name):
    assert host_name(header) == name


def test_a_server_on_the_loopback_answers_to_its_names_and_those_it_is_told():
    assert allowed_hosts("0.0.0.0") is None
    assert allowed_hosts("127.0.0.9", ["lab"]) == {"localhost", "127.0.0.1", "::1", "127.0.0.9", "lab"}
    assert refused_host("lab:80", None, allowed_hosts("localhost", ["lab"])) is None
    assert refused_host("", None, allowed_hosts("localhost")).status == 400


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
