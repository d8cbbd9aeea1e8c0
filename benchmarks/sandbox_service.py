"""How long a request to the sandbox service takes, and how much processor time it costs the service.

    python benchmarks/sandbox_service.py [--against OTHER/src] [--rounds 5]

A service in a process of its own, its client in another. With `--against`, rounds of this source tree and of another
one take turns, so that whatever else the machine does falls on both; what counts is the ratio of the best rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
TOKEN = "a token of this benchmark"
NUM = {"status": 300, "exec": 150, "judge": 80, "upload 1 MB": 30, "download 1 MB": 30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="The src folder of another tree.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        print(json.dumps(asyncio.run(round_trips())))
        return
    trees = {"this": SOURCE, **({"other": asked.against.resolve()} if asked.against else {})}
    taken: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in trees}
    for _ in range(asked.rounds):
        for name, source in trees.items():
            taken[name].append(one_round(source))
    for what in NUM:
        cells = [what.ljust(14)]
        best = {}
        for name, rounds in taken.items():
            wall, cpu = (min(found[what][place] for found in rounds) for place in (0, 1))
            best[name] = wall, cpu
            cells.append(f"{name}: {1000 * wall:7.2f} ms, {1000 * cpu:6.2f} ms of the service's processor")
        if "other" in best:
            cells.append(" ".join(f"{a / b:5.2f}x" for a, b in zip(best["this"], best["other"], strict=True)))
        print("   ".join(cells))


def one_round(source: Path) -> dict[str, tuple[float, float]]:
    command = [sys.executable, __file__, "--inside"]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(source)}, capture_output=True, check=True)
    found: dict[str, tuple[float, float]] = json.loads(ran.stdout)
    return found


async def round_trips() -> dict[str, tuple[float, float]]:
    """Seconds of wall time for each request, one after the other, and of the service's processor."""
    from mettle.sandbox import SandboxConfig, StdioTest, open_judge, open_machines

    with tempfile.TemporaryDirectory() as home:
        settings = {"port": 0, "spool_dir": home, "sandbox": {"warm": 4}}
        process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs yet
            [sys.executable, "-m", "mettle.sandbox.service", json.dumps(settings)],
            stdout=subprocess.PIPE,
            env={**os.environ, "METTLE_SANDBOX_TOKEN": TOKEN},
        )
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            os.environ["METTLE_SANDBOX_TOKEN"] = TOKEN
            config = SandboxConfig(backend="remote", urls=(url,))
            async with open_machines(config) as machines, open_judge(config) as judge:
                machine = await machines.create()
                data = os.urandom(1 << 20)
                work: dict[str, Callable[[], Awaitable[object]]] = {
                    "status": lambda: machine.connection.ask("GET", "/status"),  # type: ignore[attr-defined]
                    "exec": lambda: machine.exec(["true"]),
                    "judge": lambda: judge.judge("print(1)", [StdioTest("", "1")]),
                    "upload 1 MB": lambda: machine.upload("data", data),
                    "download 1 MB": lambda: machine.download("data"),
                }
                return {what: await timed(work[what], num, process.pid) for what, num in NUM.items()}
        finally:
            process.terminate()
            process.wait(20)


async def timed(ask: Callable[[], Awaitable[object]], num: int, pid: int) -> tuple[float, float]:
    for _ in range(5):
        await ask()
    taken = []
    before = cpu_s(pid)
    for _ in range(num):
        started = time.perf_counter()
        await ask()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken), (cpu_s(pid) - before) / num


def cpu_s(pid: int) -> float:
    """Of the process alone, without what it has started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
