"""Several Ray nodes on this host, in a process of their own: `python ray_nodes.py CPUS...` starts one a number.

It writes the address and the nodes' ids, then obeys lines: `kill INDEX`, `add CPUS`; at the end of its input all end.
`RayNodes` is that process for a test or a benchmark.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

STORE_BYTES = 80 * 2**20


class RayNodes:
    """Nodes with so many cores each (what Ray counts, not what there is); the first is the head."""

    def __init__(self, *cpus: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # its sockets want a short path
        (self._folder / "ray").mkdir()  # Ray's own shell makes it; `Cluster` does not
        environment = {
            **os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
            "RAY_TMPDIR": str(self._folder),  # where it notes the newest cluster; a run is told its own
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._folder), *map(str, cpus)], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(self._folder / "stderr").open("w"),
        )  # fmt: skip
        words = self._word()
        assert words, (self._folder / "stderr").read_text()
        self.address, *self.ids = words

    @property
    def pid(self) -> int:
        """Of the process that has started the nodes."""
        return self._process.pid

    def _word(self) -> list[str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("nodes "):
                return line.split()[1:]
        return []

    def _say(self, *words: object) -> list[str]:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return self._word()

    def kill(self, node: str) -> None:
        """End every process of the node whose id begins so, by SIGKILL."""
        index = next(index for index, known in enumerate(self.ids) if known.startswith(node))
        self._say("kill", index)

    def add(self, cpus: int) -> None:
        """A further node."""
        self.ids.append(self._say("add", cpus)[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(60.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def main(folder: str, cpus: list[int]) -> None:
    """Obey standard input."""
    from ray.cluster_utils import Cluster

    def arguments(count: int) -> dict[str, Any]:
        return {"num_cpus": count, "object_store_memory": STORE_BYTES, "include_dashboard": False}

    cluster = Cluster(initialize_head=True, head_node_args={**arguments(cpus[0]), "temp_dir": folder})
    nodes = [cluster.head_node, *(cluster.add_node(**arguments(count), temp_dir=folder) for count in cpus[1:])]
    print("nodes", cluster.address, *(node.node_id for node in nodes), flush=True)
    for line in sys.stdin:
        word, number = line.split()
        if word == "kill":
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
            print("nodes", nodes[int(number)].node_id, flush=True)
        else:
            nodes.append(cluster.add_node(**arguments(int(number)), temp_dir=folder))
            print("nodes", nodes[-1].node_id, flush=True)
    with contextlib.suppress(Exception):  # a head that was killed takes its own file along
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], [int(count) for count in sys.argv[2:]])
