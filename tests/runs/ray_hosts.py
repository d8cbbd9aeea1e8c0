"""A Ray cluster with a node on each host of a network of the tests', as `ray start` makes one on machines."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ray_nodes import STORE_BYTES
from tests.namespaces import Host

PORT = 6379
RAY = Path(sys.executable).with_name("ray")


class RayHosts:
    """Its first node is the head. Where a run finds it and its own network device stands in `environment`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nodes: list[subprocess.Popen[bytes]] = []
        self.address = ""

    @property
    def environment(self) -> dict[str, str]:
        """For a run: the names that this machine has for itself lead to none of the hosts' addresses."""
        return {"RAY_ADDRESS": self.address, "GLOO_SOCKET_IFNAME": "eth0"}

    def add(self, host: Host, cpus: int) -> None:
        """A node with so many cores (what Ray counts, not what there is); returns when it belongs to the cluster."""
        place = self._folder / f"{host.name}-{len(self._nodes)}"
        place.mkdir()
        role = (
            [f"--address={self.address}"] if self.address else ["--head", f"--port={PORT}", "--include-dashboard=false"]
        )
        self.address = self.address or f"{host.address}:{PORT}"
        command = [
            str(RAY), "start", *role, "--block", f"--node-ip-address={host.address}", f"--num-cpus={cpus}",
            f"--object-store-memory={STORE_BYTES}", f"--temp-dir={place}",
        ]  # fmt: skip
        environment = {
            **os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
            "RAY_TMPDIR": str(self._folder),
        }  # fmt: skip
        output = place / "output.txt"
        with host.inside(), output.open("wb") as out:
            self._nodes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + 300.0
        while "Ray runtime started" not in output.read_text(errors="replace"):
            assert self._nodes[-1].poll() is None, output.read_text(errors="replace")
            assert time.monotonic() < deadline, "the node of Ray did not start in time"
            time.sleep(0.1)

    def close(self) -> None:
        for node in self._nodes:
            node.kill()
            node.wait()


@contextlib.contextmanager
def ray_folder() -> Iterator[Path]:
    """Where Ray keeps its files: its sockets want a short path."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def ray_hosts() -> Iterator[RayHosts]:
    """A cluster without nodes. What they start ends with the network that they are on."""
    with ray_folder() as folder:
        found = RayHosts(folder)
        try:
            yield found
        finally:
            found.close()
