"""How long does it take to judge a small program in a warm cell, against what the machine could do at best?

Samples of every variant are interleaved, so that a busy machine slows all of them; the ratios are what to compare.
The floor is fork, exit and wait of the template's own kind of interpreter, with no isolation and nothing run.

    python benchmarks/sandbox_judge.py [--samples 100] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from mettle.sandbox import SandboxConfig, SandboxPool, StdioTest
from mettle.sandbox.zygote import watch

PROGRAM = "n = int(input())\nprint(sum(range(n)))\n"
TEST = StdioTest("100\n", "4950\n")
FLOOR = """
import gc, os, sys, time, types
for name, folder in (("mettle", sys.argv[1]), ("mettle.sandbox", sys.argv[1] + "/sandbox")):
    package = types.ModuleType(name)
    package.__path__ = [folder]
    sys.modules[name] = package
from mettle.sandbox.zygote import template
template._preload()
gc.collect(); gc.freeze(); gc.disable()
while sys.stdin.readline():
    started = time.perf_counter()
    pid = os.fork()
    if pid == 0: os._exit(0)
    os.waitpid(pid, 0)
    print(time.perf_counter() - started, flush=True)
"""
PYTHON = os.path.realpath(sys.executable)
SOURCE = Path(__file__).resolve().parents[1] / "src" / "mettle"


class ForkFloor:
    """A bare interpreter, loaded like the template, that forks on request and says how long it took."""

    def __init__(self) -> None:
        command = [PYTHON, "-I", "-S", "-c", FLOOR, str(SOURCE)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def sample(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def run_plainly(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, input=b"100\n", capture_output=True, check=True)
    return time.perf_counter() - started


async def judge_once(pool: SandboxPool, num_tests: int = 1) -> float:
    started = time.perf_counter()
    result = await pool.judge(PROGRAM, [TEST] * num_tests)
    assert result.has_passed
    return (time.perf_counter() - started) / num_tests


async def measure_latency(pool: SandboxPool, unsafe: SandboxPool, num_samples: int) -> dict[str, list[float]]:
    floor = ForkFloor()
    plain: dict[str, Callable[[], float]] = {
        "fork + exit of the interpreter": floor.sample,
        "subprocess /bin/true": lambda: run_plainly(["/bin/true"]),
        "subprocess python -I -S": lambda: run_plainly([PYTHON, "-I", "-S", "-c", PROGRAM]),
        "subprocess python": lambda: run_plainly([PYTHON, "-c", PROGRAM]),
    }
    judged: dict[str, Callable[[], Awaitable[float]]] = {
        "judge, warm": lambda: judge_once(pool),
        "judge, per test of 20": lambda: judge_once(pool, 20),
        "judge, unsafe backend": lambda: judge_once(unsafe),
    }
    times: dict[str, list[float]] = {name: [] for name in (*plain, *judged)}
    for _ in range(num_samples):
        for name, run in plain.items():
            times[name].append(run())
        for name, judge in judged.items():
            await asyncio.sleep(0.02)  # lets the refill finish, as it does between a trainer's requests
            times[name].append(await judge())
    floor.close()
    return times


def tree_cpu_s(pid: int) -> float:
    """Processor seconds of the template, of all cells that it has collected, and of this process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + time.process_time()


async def measure_throughput(pool: SandboxPool, num_judgements: int) -> dict[str, float]:
    template = pool.template_pid
    assert template is not None
    cpu_s, started = tree_cpu_s(template), time.perf_counter()
    await asyncio.gather(*(judge_once(pool) for _ in range(num_judgements)))
    wall_s = time.perf_counter() - started
    await asyncio.sleep(1.5)  # the template collects its dead once a second
    cpu_ms = (tree_cpu_s(template) - cpu_s) / num_judgements * 1000
    return {"n": num_judgements, "per_s": num_judgements / wall_s, "cpu_ms_each": cpu_ms}


def idle_cell_bytes(pool: SandboxPool) -> float:
    """What one more waiting cell costs: the memory that process 1 and its child share with no other process."""
    assert pool.template_pid is not None
    total = 0
    for pid in watch.descendants(pool.template_pid):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024
    return total / pool.stats.num_warm


def summarize(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    rows = {}
    floor = sorted(times["fork + exit of the interpreter"])
    for name, samples in times.items():
        ordered = sorted(samples)
        p50, p95 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.95)]
        rows[name] = {
            "n": len(ordered),
            "min_ms": ordered[0] * 1000,
            "p50_ms": p50 * 1000,
            "p95_ms": p95 * 1000,
            "p50_to_floor": p50 / floor[len(floor) // 2],
        }
    return rows


async def main(num_samples: int) -> dict[str, Any]:
    config = SandboxConfig(warm=4)
    async with SandboxPool(config) as pool, SandboxPool(SandboxConfig(backend="unsafe", warm=4)) as unsafe:
        rows = summarize(await measure_latency(pool, unsafe, num_samples))
        throughput = await measure_throughput(pool, 4 * num_samples)
        await asyncio.sleep(0.5)
        return {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
            "python": platform.python_version(),
            "load_average": os.getloadavg()[0],
            "isolation": pool.isolation.grade,
            "latency": rows,
            "throughput": throughput,
            "idle_cell_mb": idle_cell_bytes(pool) / (1 << 20),
        }


def show(found: dict[str, Any]) -> None:
    lines = [f"{found['machine']}, load {found['load_average']:.1f}, isolation {found['isolation']}"]
    lines.append(f"{'':32}{'min ms':>9}{'p50 ms':>9}{'p95 ms':>9}{'p50/floor':>11}")
    for name, row in found["latency"].items():
        figures = f"{row['min_ms']:9.2f}{row['p50_ms']:9.2f}{row['p95_ms']:9.2f}{row['p50_to_floor']:11.1f}"
        lines.append(f"{name:32}{figures}")
    rate = found["throughput"]
    lines.append(f"sustained: {rate['per_s']:.0f} judgements/s, {rate['cpu_ms_each']:.1f} ms of processor each")
    lines.append(f"a waiting cell: {found['idle_cell_mb']:.1f} MB")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    measured = asyncio.run(main(arguments.samples))
    show(measured)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n")
