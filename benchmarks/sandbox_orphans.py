"""What is left of sandboxes whose owner is killed with -9, at a random moment, again and again? It must be nothing.

Each round starts an owner at work (a judge pool and a machine pool under the soak's load, and machines full of deep
trees of processes that have left their session and ignore signals), kills it, and counts what it had below it and
beside it.

    pools     one process that holds both pools, killed from the start of its first template on
    service   `mettle sandbox serve`, killed under a client
    client    the client of a service, killed; its machines end with its lease, and then the service is killed, too

This process adopts orphans, so that no survivor escapes the count by leaving its parent, session or group. The other
counts are mounts beside its own, cgroups of the killed, what is in the folder for temporary files, and sockets with a
name or a port. Uploads that a killed service was receiving are removed by the next one that starts, and counted apart.

    python benchmarks/sandbox_orphans.py [--rounds 50] [--json FILE]

Exit code 1: something was left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from soak_load import Side, Traffic
from soak_machines import DEEP_TREE, SMALL
from soak_resources import ResourceCount, adopt_orphans, bury_orphans, take_own_mounts

from mettle.sandbox import SandboxConfig, open_judge, open_machines
from mettle.sandbox.zygote import watch

KINDS = ("pools", "pools", "pools", "service", "client")
PATIENCE_S = 15.0
_START_S = 60.0
_LEASE_S = 1.0
_TOKEN = "a-token-of-this-benchmark"
_SOURCE = str(Path(__file__).resolve().parents[1] / "src")


@dataclass
class Round:
    """One owner's life and end."""

    kind: str
    killed_after_s: float
    num_processes: int
    gone_after_s: float
    left: dict[str, int] = field(default_factory=dict)
    num_swept: int = 0  # uploads of a killed service that the next service's start has removed


class Arena:
    """Starts, kills and counts. Everything it starts keeps its temporary files in `folder`."""

    def __init__(self, folder: Path, rng: random.Random, mountinfo: Path = Path("/proc/self/mountinfo")) -> None:
        self.folder, self.rng, self._mountinfo = folder, rng, mountinfo
        self._num_mounts_before = self._num_mounts()
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [_SOURCE, os.environ.get("PYTHONPATH")])),
            "TMPDIR": str(folder),
            "METTLE_SANDBOX_TOKEN": _TOKEN,
        }

    def play(self, kind: str) -> Round:
        """One round."""
        if kind == "pools":
            return self._kill_pools()
        with self._service() as (service, url):
            client = self._start(__file__, "--owner", url, "--seed", str(self.rng.randrange(1 << 30)))
            _wait(lambda: _num_machines(url) >= 3, _START_S, "the client makes machines")
            after_s = self.rng.uniform(0.0, 2.0)
            time.sleep(after_s)
            num = len(watch.live_descendants(os.getpid()))
            if kind == "service":
                service.kill()
                gone_after_s = self._wait_gone([client.pid])
                client.kill()
            else:
                client.kill()
                killed = time.monotonic()
                with contextlib.suppress(TimeoutError):
                    _wait(lambda: _num_machines(url) == 0, PATIENCE_S, "the machines of the client end")
                gone_after_s, num_left = time.monotonic() - killed, _num_machines(url)
                service.kill()
                if num_left:
                    return Round(kind, after_s, num, gone_after_s, {"machines of the client": num_left})
            self._wait_gone([])
            num_swept = self._sweep()
            return Round(kind, after_s, num, gone_after_s, self.left([service.pid, client.pid], url), num_swept)

    def _sweep(self) -> int:
        """Uploads that were under way wait for the next service; how many it found."""
        num_uploads = sum(1 for _ in self.folder.glob("mettle-upload-*"))
        if num_uploads:
            with self._service():
                pass
            self._wait_gone([])
        return num_uploads

    def _kill_pools(self) -> Round:
        owner = self._start(__file__, "--owner", "here", "--seed", str(self.rng.randrange(1 << 30)))
        _wait(lambda: bool(watch.descendants(owner.pid)), _START_S, "the owner starts its first template")
        after_s = self.rng.uniform(0.0, 4.0)
        time.sleep(after_s)
        num = len(watch.live_descendants(owner.pid))
        owner.kill()
        gone_after_s = self._wait_gone([])
        return Round("pools", after_s, num, gone_after_s, self.left([owner.pid], ""))

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *words], env=self.environment, stdout=subprocess.DEVNULL)

    @contextlib.contextmanager
    def _service(self) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
        settings = {"port": 0, "spool_dir": str(self.folder), "lease_s": _LEASE_S, "sandbox": {"warm": 2}}
        command = [sys.executable, "-m", "mettle.sandbox.service", json.dumps(settings)]
        process = subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE)
        with process:
            assert process.stdout is not None
            try:
                yield process, json.loads(process.stdout.readline())["url"]
            finally:
                process.kill()

    def _wait_gone(self, spared: list[int]) -> float:
        """Seconds until nothing is below this process but the spared; what is late shows in `left`."""
        started = time.monotonic()
        with contextlib.suppress(TimeoutError):
            _wait(lambda: not self._survivors(spared), PATIENCE_S, "the killed owner's processes end")
        return time.monotonic() - started

    def _num_mounts(self) -> int:
        return len(self._mountinfo.read_text().splitlines())

    def _survivors(self, spared: list[int]) -> list[int]:
        bury_orphans()
        return [pid for pid in watch.live_descendants(os.getpid()) if pid not in spared]

    def left(self, owners: list[int], url: str) -> dict[str, int]:
        """What there still is of owners that were killed, by its kind."""
        resource_count = [ResourceCount(self.folder, own_pid=pid) for pid in owners]
        with contextlib.suppress(TimeoutError):  # the warden of a cgroup ends after it has removed it
            _wait(lambda: not sum(one.num_cgroups() for one in resource_count), PATIENCE_S, "the cgroups are removed")
        found = {
            "processes": len(self._survivors([])),
            "mounts": max(0, self._num_mounts() - self._num_mounts_before),
            "cgroups": sum(one.num_cgroups() for one in resource_count),
            "folders and files": sum(len(below) + len(files) for _, below, files in os.walk(self.folder)),
            "sockets": int(bool(url) and _is_listening(url)) + _num_named_sockets(self.folder),
        }
        return {name: count for name, count in found.items() if count}


async def own(url: str, seed: int) -> None:
    """Be an owner: hold pools (or the client's ends of them), and keep them busy until killed."""
    logging.disable()  # what is lost with a killed service is no news
    config = SandboxConfig(warm=2) if url == "here" else SandboxConfig(backend="remote", urls=(url,), warm=2)
    async with open_judge(config) as judge, open_machines(config) as machines:
        for _ in range(3):
            machine = await machines.create(SMALL)
            await machine.start(DEEP_TREE)
        side = Side("orphans", judge, machines, Traffic(), random.Random(seed))
        await side.window(_START_S)


def summary(rounds: list[Round]) -> dict[str, dict[str, Any]]:
    """A row for each kind."""
    rows = {}
    for kind in dict.fromkeys(one.kind for one in rounds):
        of_kind = [one for one in rounds if one.kind == kind]
        gone = sorted(one.gone_after_s for one in of_kind)
        rows[kind] = {
            "n": len(of_kind),
            "processes_killed_median": statistics.median(one.num_processes for one in of_kind),
            "processes_killed_max": max(one.num_processes for one in of_kind),
            "gone_after_s_median": round(statistics.median(gone), 3),
            "gone_after_s_max": round(gone[-1], 3),
            "uploads_swept": sum(one.num_swept for one in of_kind),
            **{f"left_{name.split()[0]}": sum(one.left.get(name, 0) for one in of_kind) for name in LEFT},
        }
    return rows


LEFT = ("processes", "mounts", "cgroups", "folders and files", "sockets", "machines of the client")


def show(rows: dict[str, dict[str, Any]]) -> None:
    names = list(next(iter(rows.values())))
    print("\n".join([f"{'':26}" + "".join(f"{kind:>10}" for kind in rows)]))
    for name in names:
        print(f"{name:26}" + "".join(f"{row[name]:>10g}" for row in rows.values()))


def _wait(is_so: Callable[[], bool], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit_s:g} s: {what}")
        time.sleep(0.02)


def _num_named_sockets(folder: Path) -> int:
    return sum(str(folder) in line for line in Path("/proc/net/unix").read_text().splitlines())


def _is_listening(url: str) -> bool:
    parts = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((parts.hostname or "", parts.port or 0)) == 0


def _num_machines(url: str) -> int:
    request = urllib.request.Request(f"{url}/api/v1/status", headers={"Authorization": f"Bearer {_TOKEN}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return int(json.load(answer)["load"]["num_machines"])


def main(num_rounds: int, seed: int) -> dict[str, Any]:
    adopt_orphans()
    take_own_mounts()
    rng = random.Random(seed)
    rounds = []
    with tempfile.TemporaryDirectory(prefix="mettle-orphans-") as folder:
        arena = Arena(Path(folder), rng)
        for number in range(num_rounds):
            rounds.append(arena.play(KINDS[number % len(KINDS)]))
            one = rounds[-1]
            print(
                f"{number + 1:3} {one.kind:8} killed after {one.killed_after_s:4.1f} s:"
                f" {one.num_processes:3} processes, gone after {one.gone_after_s:5.2f} s,"
                f" left: {one.left or 'nothing'}",
                flush=True,
            )
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "python": platform.python_version(),
        "seed": seed,
        "is_clean": not any(one.left for one in rounds),
        "summary": summary(rounds),
        "rounds": [asdict(one) for one in rounds],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--owner", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.owner:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        asyncio.run(own(arguments.owner, arguments.seed))
        sys.exit(0)
    measured = main(arguments.rounds, arguments.seed)
    show(measured["summary"])
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n")
    sys.exit(0 if measured["is_clean"] else 1)
