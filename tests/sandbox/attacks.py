"""The safety suite's attacks on a test that is judged, by name. Nearly all of them are run in machines as well."""

from __future__ import annotations

from attack import PRELUDE, Attack
from attacks_compiled import COMPILED
from attacks_files import FILES, LEFTOVERS, SECRETS
from attacks_kernel import KERNEL
from attacks_network import NETWORK
from attacks_processes import PROCESSES
from attacks_resources import RESOURCES

GROUPS = {
    "Files": FILES,
    "Leftovers of others": LEFTOVERS,
    "Secrets": SECRETS,
    "Processes": PROCESSES,
    "Resources": RESOURCES,
    "Network": NETWORK,
    "Kernel": KERNEL,
    "Programs of its own making": COMPILED,
}
ATTACKS = [attack for attacks in GROUPS.values() for attack in attacks]

__all__ = ["ATTACKS", "GROUPS", "PRELUDE", "Attack"]
