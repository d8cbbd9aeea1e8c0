"""What a machine may reach: an allow-list of hosts and ports, and which addresses a name may lead to.

A rule is `host:port` or `host` (ports 80 and 443): a name, `*.name` for all names below it, an address, or a network
(`10.0.0.0/8:5432`, `[fd00::/8]:443`). A name that a rule allows is resolved by the owner, and only public addresses
are taken, unless another rule lists the address itself.
Invariant: nothing is reached that no rule names; addresses of this host, of private networks and of the cloud's
metadata are reached only where a rule names the address.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from mettle.errors import UserError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_DEFAULT_PORTS: Final = frozenset({80, 443})
_MAX_PORT: Final = 65_535
_MAX_RULES: Final = 1024
_RULE: Final = re.compile(r"(?P<host>\[[^\]]+\]|[^:\[\]]+)(?::(?P<port>\d+|\*))?")
_NAME: Final = re.compile(r"(\*\.)?([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.?")
_LOOKS_LIKE_ADDRESS: Final = re.compile(
    r"(^|\.)(\d+|0x[0-9a-f]*)\.?$"
)  # to the C library, which takes 127.1 and 0x7f.1
# Addresses that hold another one, which the way there may unpack: mapped, translated, tunnelled.
_WRAPPERS: Final = tuple(
    map(ipaddress.ip_network, ("::/96", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"))
)

_PUBLIC_IPV6: Final = ipaddress.ip_network("2000::/3")  # all that is given out; site-local addresses are not
# Global by their number and local all the same: metadata of two clouds, and relays into the old address family.
_NEARBY: Final = tuple(map(ipaddress.ip_network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))


@dataclass(frozen=True, slots=True)
class NetworkRule:
    """One entry of the list. `ports` is None for every port."""

    text: str
    name: str
    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None
    ports: frozenset[int] | None

    @classmethod
    def parse(cls, text: str) -> Self:
        found = _RULE.fullmatch(text.strip().lower()) if isinstance(text, str) else None
        if found is None:
            raise UserError(f"network.allow has {text!r}; a rule is 'host:port', with [brackets] around IPv6 addresses")
        host, port = found["host"].strip("[]"), found["port"]
        ports = _DEFAULT_PORTS if port is None else None if port == "*" else frozenset({int(port)})
        if ports and not all(1 <= number <= _MAX_PORT for number in ports):
            raise UserError(f"network.allow has {text!r}; ports go from 1 to {_MAX_PORT}, and * is all of them")
        try:
            return cls(text, "", ipaddress.ip_network(host), ports)
        except ValueError:
            pass
        if not _NAME.fullmatch(host) or _LOOKS_LIKE_ADDRESS.search(host):
            raise UserError(
                f"network.allow has {text!r}; {host!r} is neither a host's name nor an address nor a network"
            )
        return cls(text, host.rstrip("."), None, ports)

    def has_name(self, name: str, port: int) -> bool:
        """Whether it allows a host by its name."""
        if not self._has_port(port) or not self.name:
            return False
        if self.name.startswith("*."):
            return name.endswith(self.name[1:]) and len(name) > len(self.name) - 1
        return name == self.name

    def has_address(self, address: Address, port: int) -> bool:
        """Whether it names an address, or a network that it is in."""
        return self.network is not None and self._has_port(port) and address in self.network

    def _has_port(self, port: int) -> bool:
        return self.ports is None or port in self.ports


@dataclass(frozen=True, slots=True)
class Network:
    """The list of one machine."""

    rules: tuple[NetworkRule, ...] = field(default=())

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """From `{"allow": ["host:port", ...]}`. Raises: UserError for anything else."""
        unknown = sorted(set(given) - {"allow"})
        if unknown or isinstance(given.get("allow"), str) or not isinstance(given.get("allow", ()), Sequence):
            raise UserError(f"a machine's network is {dict(given)!r}; it must be {{'allow': ['host:port', ...]}}")
        allowed = given.get("allow", ())
        if len(allowed) > _MAX_RULES:
            raise UserError(f"network.allow has {len(allowed)} rules; it may have {_MAX_RULES}")
        return cls(tuple(NetworkRule.parse(text) for text in allowed))

    def why_host_refused(self, host: str, port: int) -> str | None:
        """Why no connection to this host is tried, or None if its addresses decide."""
        if any(rule.has_name(host, port) for rule in self.rules):
            return None
        address = _address(host)
        if address is not None and self.lists(address, port):
            return None
        return f"{host}:{port} is not in network.allow"

    def why_address_refused(self, address: Address, port: int) -> str | None:
        """Why an address that an allowed name led to is not taken."""
        if self.lists(address, port) or is_public(address):
            return None
        return f"{address} is not a public address, and network.allow does not list it"

    def lists(self, address: Address, port: int) -> bool:
        return any(rule.has_address(address, port) for rule in self.rules)


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Whether an address belongs to the open internet, and to nothing that is closer."""
    if any(address in network for network in (*_WRAPPERS, *_NEARBY)):
        return False
    if address.version == 6 and address not in _PUBLIC_IPV6:
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)
