"""A network of a test's own: a Hub and its machines in network namespaces, joined by pairs of virtual cables.

Each machine has two cables to the Hub's namespace: one on which it reaches the Hub, which the test pulls out, and one on
which it reaches the model that it asks, which stays. Both servers stand on addresses of their own, so that each is
reached over its own cable alone. Nothing here is connected to the host's network.

Parts: `Network`, `own_network`, `why_no_network`. Invariant: when the block ends there is no namespace of it left.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HUB, MODEL = "10.79.0.1", "10.79.0.2"
_CLONE_NEWNET = 0x40000000


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check, timeout=60)


def why_no_network() -> str:
    """Why this host gives no network namespaces to a test; empty where it does."""
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    if os.geteuid() != 0:
        return "network namespaces with cables between them need root"
    name = f"mettle-{os.getpid()}-try"
    made = _ip("netns", "add", name, check=False)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    cable = _ip("-n", name, "link", "add", "name", "a", "type", "veth", "peer", "name", "b", check=False)
    _ip("netns", "del", name)
    return f"no virtual cables here: {cable.stderr.strip()}" if cable.returncode else ""


class Network:
    """The namespace of a Hub, and one for each of `num_machines`."""

    def __init__(self, num_machines: int) -> None:
        self._name = f"mettle-{os.getpid()}"
        self._num = num_machines

    def hub(self) -> list[str]:
        """What a command begins with that runs where the Hub is."""
        return ["ip", "netns", "exec", f"{self._name}-hub"]

    def machine(self, number: int) -> list[str]:
        """The same for a machine."""
        return ["ip", "netns", "exec", f"{self._name}-{number}"]

    def make(self) -> None:
        """Namespaces and cables; a machine has a route to each of the two servers, over its own cable."""
        hub = f"{self._name}-hub"
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "set", "lo", "up")
        for address in (HUB, MODEL):
            _ip("-n", hub, "addr", "add", f"{address}/32", "dev", "lo")
        for number in range(self._num):
            machine = f"{self._name}-{number}"
            _ip("netns", "add", machine)
            _ip("-n", machine, "link", "set", "lo", "up")
            for kind, (cable, server) in enumerate((("hub", HUB), ("model", MODEL))):
                net = f"10.{80 + kind}.{number}"
                there = f"{cable}{number}"
                _ip("-n", hub, "link", "add", "name", there, "type", "veth", "peer", "name", cable, "netns", machine)
                _ip("-n", hub, "addr", "add", f"{net}.1/24", "dev", there)
                _ip("-n", machine, "addr", "add", f"{net}.2/24", "dev", cable)
                _ip("-n", hub, "link", "set", there, "up")
                _ip("-n", machine, "link", "set", cable, "up")
                _ip("-n", machine, "route", "add", server, "via", f"{net}.1")

    def cut(self, number: int) -> None:
        """Pull the machine's cable to the Hub out."""
        _ip("-n", f"{self._name}-hub", "link", "set", f"hub{number}", "down")

    def mend(self, number: int) -> None:
        """Put it in again."""
        _ip("-n", f"{self._name}-hub", "link", "set", f"hub{number}", "up")

    def remove(self) -> None:
        for name in (f"{self._name}-hub", *(f"{self._name}-{number}" for number in range(self._num))):
            _ip("netns", "del", name, check=False)

    @contextmanager
    def at_the_hub(self) -> Iterator[None]:
        """This thread, and what it starts, stands in the Hub's namespace meanwhile."""
        enter = ctypes.CDLL(None, use_errno=True).setns
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(Path("/run/netns") / f"{self._name}-hub", os.O_RDONLY)
        try:
            if enter(there, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            yield
        finally:
            assert enter(here, _CLONE_NEWNET) == 0, "back where the tests run"
            os.close(there)
            os.close(here)


@contextmanager
def own_network(num_machines: int) -> Iterator[Network]:
    network = Network(num_machines)
    try:
        network.make()
        yield network
    finally:
        network.remove()
