"""Rules of a machine's allow-list, public addresses, and heads of requests, each on its own."""

from __future__ import annotations

import asyncio
import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.errors import UserError
from mettle.sandbox import MachineConfig
from mettle.sandbox.machines.http_heads import BadHead, Head, read_head
from mettle.sandbox.machines.network import Network, is_public
from mettle.sandbox.service.client.machine import machine_request


@pytest.mark.parametrize(
    "rule",
    [
        "",
        "a b",
        "http://example.com",
        "example.com:0",
        "example.com:70000",
        "example.com:x",
        "*",
        "a.*.com",
        "::1:80",
        "1.2.3",
        "0x7f.1",
        "-x.com",
        5,
    ],
)
def test_a_rule_that_cannot_be_read_is_refused_by_name(rule: str) -> None:
    with pytest.raises(UserError, match=r"network\.allow"):
        MachineConfig(network={"allow": [rule]})


@pytest.mark.parametrize("given_network", [{"deny": []}, {"allow": "example.com"}, {"allow": 5}])
def test_a_network_that_is_no_list_is_refused(given_network: dict[str, object]) -> None:
    with pytest.raises(UserError, match="must be"):
        MachineConfig(network=given_network)


@pytest.mark.parametrize(
    ("rule", "host", "port", "is_allowed"),
    [
        ("example.com", "example.com", 443, True),
        ("example.com", "example.com", 80, True),
        ("example.com", "example.com", 8080, False),
        ("example.com:*", "example.com", 8080, True),
        ("Example.COM.:443", "example.com", 443, True),
        ("example.com:443", "www.example.com", 443, False),
        ("*.example.com:443", "www.example.com", 443, True),
        ("*.example.com:443", "a.b.example.com", 443, True),
        ("*.example.com:443", "example.com", 443, False),
        ("*.example.com:443", "badexample.com", 443, False),
        ("10.0.0.0/8:5432", "10.1.2.3", 5432, True),
        ("10.0.0.0/8:5432", "11.1.2.3", 5432, False),
        ("[fd00::/8]:443", "fd00::1", 443, True),
        ("[::1]:443", "::1", 443, True),
    ],
)
def test_a_rule_means_what_it_says(rule: str, host: str, port: int, is_allowed: bool) -> None:
    assert (Network.read({"allow": [rule]}).why_host_refused(host, port) is None) is is_allowed


@pytest.mark.parametrize(
    "text",
    [
        *(
            "127.0.0.1",
            "10.0.0.1",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
        ),
        *("255.255.255.255", "::1", "::", "fe80::1", "fd00::1", "ff02::1", "::ffff:8.8.8.8", "64:ff9b::7f00:1"),
        *("2002:7f00:1::", "::7f00:1", "192.0.2.1", "198.18.0.1", "240.0.0.1"),
        "fec0::2",
        "168.63.129.16",
        "192.0.0.192",
        "192.88.99.1",
        "3fff::1",
        "4000::1",
    ],
)
def test_addresses_near_by_are_not_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", ["1.1.1.1", "8.8.8.8", "2606:4700:4700::1111"])
def test_addresses_of_the_internet_are_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@given(st.binary(max_size=300))
def test_whatever_a_machine_sends_is_a_sound_request_or_refused(data: bytes) -> None:
    async def read() -> Head | None:
        reader = asyncio.StreamReader()
        reader.feed_data(b"GET http://example.com/" + data + b"\r\n\r\n")
        reader.feed_eof()
        try:
            return await read_head(reader)
        except (BadHead, asyncio.IncompleteReadError):
            return None

    head = asyncio.run(read())
    if head is not None:
        forwarded = head.forwarded()
        assert head.host == "example.com" or b"example.com" in head.host.encode()
        assert forwarded.count(b"\r\n\r\n") == 1
        assert forwarded.lower().count(b"\r\nhost:") == 1


@pytest.mark.parametrize(
    "request_line",
    [
        b"GET http://[x/ HTTP/1.1",
        b"GET http://a]:80/ HTTP/1.1",
        b"GET http://example.com:" + b"1" * 5000 + b"/ HTTP/1.1",
        b"CONNECT example.com:" + b"1" * 5000 + b" HTTP/1.1",
        b"CONNECT " + b"a" * 64 + b".example.com:443 HTTP/1.1",
        b"CONNECT a..example.com:443 HTTP/1.1",
        b"CONNECT .example.com:443 HTTP/1.1",
    ],
)
def test_an_address_that_cannot_be_one_is_refused_before_anybody_asks_for_it(request_line: bytes) -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(request_line + b"\r\n\r\n")
        with pytest.raises(BadHead) as caught:
            await read_head(reader)
        assert caught.value.status == 400

    asyncio.run(read())


def test_a_service_is_not_asked_for_a_network_in_silence() -> None:
    with pytest.raises(UserError, match="no network"):
        machine_request(MachineConfig(network={"allow": ["example.com"]}))
    assert machine_request(MachineConfig(cpus=1.5))["cpus"] == 1.5
