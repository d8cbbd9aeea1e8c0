"""A port for a process that is yet to be started stays free until it is."""

import socket
from pathlib import Path

import pytest

from mettle.runs import ports
from mettle.runs.ports import free_port, is_port_free

GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(not GIVEN.exists(), reason="this system does not say which ports it gives")
def test_a_free_port_is_none_that_the_system_gives_to_others():
    first, last = map(int, GIVEN.read_text().split())
    found = [free_port() for _ in range(20)]
    assert all(is_port_free(port) for port in found)
    assert [port for port in found if first <= port <= last] == []
    assert len(set(found)) > 10, "two runs that start at once are given two"


@pytest.mark.parametrize("said", [None, "", "1024\t65535\n"], ids=["no file", "nothing", "nearly all"])
def test_where_no_port_is_kept_from_others_it_is_any_free_one(monkeypatch, tmp_path, said):
    monkeypatch.setattr(ports, "_GIVEN", tmp_path / "range")
    if said is not None:
        (tmp_path / "range").write_text(said)
    assert is_port_free(free_port())


def test_a_port_that_somebody_listens_on_is_not_free():
    with socket.create_server((ports.LOOPBACK, 0)) as server:
        assert not is_port_free(server.getsockname()[1])
    assert is_port_free(0)
