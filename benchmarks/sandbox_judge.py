"""How long does it take to judge a small program, against what the machine could do at best, and against other ways?

Samples of every variant are interleaved, so that a busy machine slows all of them; the ratios are what to compare.
The floor is fork, exit and wait of the template's own kind of interpreter, with no isolation and nothing run. The
sustained rates keep as many executions in flight as there are cores, one variant after another, twice round.

    python benchmarks/sandbox_judge.py [--samples 100] [--executions 200] [--busy 0] [--brief] [--json FILE]
    python benchmarks/sandbox_judge.py --against OTHER/src [--rounds 8]

The second compares the processor time of this version's template and cells with another's, in turns: OTHER is a
checkout (`git worktree add OTHER COMMIT`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from mettle.sandbox import SandboxConfig, SandboxPool, StdioTest, templates
from mettle.sandbox.zygote import watch

PROGRAM = "n = int(input())\nprint(sum(range(n)))\n"
NUMPY_PROGRAM = "import numpy\nn = int(input())\nprint(numpy.arange(n).sum())\n"
BASH_PROGRAM = "read n; echo $((n * (n - 1) / 2))\n"
C_PROGRAM = (
    '#include <stdio.h>\nint main(void) { int n; scanf("%d", &n); printf("%d\\n", n * (n - 1) / 2); return 0; }\n'
)
JAVASCRIPT_PROGRAM = "const n = Number(require('fs').readFileSync(0, 'utf8')); console.log(n * (n - 1) / 2)\n"
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
FLOOR_NAME = "fork + exit of the interpreter"
BWRAP_NAME = "bwrap python -I -S"
BARE_NAME = "subprocess python -I -S"
BARE_PYTHON = [PYTHON, "-I", "-S", "-c", PROGRAM]
BWRAP = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib",
         "--symlink", "usr/lib64", "/lib64", "--symlink", "usr/bin", "/bin", "--proc", "/proc", "--dev", "/dev",
         "--tmpfs", "/tmp", "--ro-bind", sys.base_prefix, sys.base_prefix, "--"]  # fmt: skip
BRIEF = (FLOOR_NAME, BARE_NAME, BWRAP_NAME, "judge, warm", "judge, per test of 20")
Run = Callable[[], float]
Judge = Callable[[], Awaitable[float]]


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

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.communicate()


def run_plainly(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, input=b"100\n", capture_output=True, check=True)
    return time.perf_counter() - started


async def judge_once(pool: SandboxPool, code: str = PROGRAM, language: str = "python", num_tests: int = 1) -> float:
    started = time.perf_counter()
    result = await pool.judge(code, [TEST] * num_tests, language=language)
    assert result.has_passed, result.tests[0]
    return (time.perf_counter() - started) / num_tests


def plain_variants(floor: ForkFloor) -> dict[str, Run]:
    variants: dict[str, Run] = {
        FLOOR_NAME: floor.sample,
        "subprocess /bin/true": lambda: run_plainly(["/bin/true"]),
        BARE_NAME: lambda: run_plainly(BARE_PYTHON),
        "subprocess python": lambda: run_plainly([PYTHON, "-c", PROGRAM]),
        "subprocess bash": lambda: run_plainly(["bash", "-c", BASH_PROGRAM]),
        "subprocess node": lambda: run_plainly(["node", "-e", JAVASCRIPT_PROGRAM]),
    }
    if can_bwrap():
        variants["bwrap /bin/true"] = lambda: run_plainly([*BWRAP, "/bin/true"])
        variants[BWRAP_NAME] = lambda: run_plainly([*BWRAP, *BARE_PYTHON])
    return {name: run for name, run in variants.items() if shutil.which(name.split()[-1]) or "node" not in name}


def can_bwrap() -> bool:
    return bool(shutil.which("bwrap")) and subprocess.run([*BWRAP, "/bin/true"], check=False).returncode == 0


def judged_variants(pool: SandboxPool, unsafe: SandboxPool) -> dict[str, Judge]:
    variants: dict[str, Judge] = {
        "judge, warm": lambda: judge_once(pool),
        "judge, per test of 20": lambda: judge_once(pool, num_tests=20),
        "judge, unsafe backend": lambda: judge_once(unsafe),
        "judge, bash": lambda: judge_once(pool, BASH_PROGRAM, "bash"),
        "judge, C compiled before": lambda: judge_once(pool, C_PROGRAM, "c"),
        "judge, JavaScript": lambda: judge_once(pool, JAVASCRIPT_PROGRAM, "javascript"),
    }
    needs = {"judge, C compiled before": "gcc", "judge, JavaScript": "node"}
    return {name: judge for name, judge in variants.items() if name not in needs or shutil.which(needs[name])}


async def sample(plain: dict[str, Run], judged: dict[str, Judge], num_samples: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in (*plain, *judged)}
    for judge in judged.values():
        await judge()  # compiles, and lets the pool see which kinds of cells are used
    for _ in range(num_samples):
        for name, run in plain.items():
            times[name].append(run())
        for name, judge in judged.items():
            await asyncio.sleep(0.02)  # lets the refill finish, as it does between a trainer's requests
            times[name].append(await judge())
    return times


async def sample_numpy(num_samples: int) -> dict[str, list[float]]:
    """The same program with numpy: imported by each test, and before any of them."""
    shown, loaded = SandboxConfig(python_packages=("numpy",)), SandboxConfig(preload=("numpy",))
    async with SandboxPool(shown) as importing, SandboxPool(loaded) as preloaded:
        judged: dict[str, Judge] = {
            "judge, numpy preloaded": lambda: judge_once(preloaded, NUMPY_PROGRAM),
            "judge, numpy imported": lambda: judge_once(importing, NUMPY_PROGRAM),
        }
        return await sample({}, judged, num_samples)


def tree_cpu_s(pid: int) -> float:
    """Processor seconds of the template and of all cells that it has collected."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def own_cpu_s() -> float:
    """Processor seconds of this process and of all that it has collected."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, kinds))


async def measure_rate(run: Judge, num_executions: int, in_flight: int, pids: list[int]) -> dict[str, float]:
    """Executions a second with so many in flight, and the processor time of each: this process's, what it has
    collected, and what these others have used and collected."""
    limit = asyncio.Semaphore(in_flight)

    async def one() -> None:
        async with limit:
            await run()

    cpu_s, started = own_cpu_s() + sum(map(tree_cpu_s, pids)), time.perf_counter()
    await asyncio.gather(*(one() for _ in range(num_executions)))
    wall_s = time.perf_counter() - started
    await asyncio.sleep(1.5 if pids else 0.0)  # the template collects its dead once a second
    cpu_s = own_cpu_s() + sum(map(tree_cpu_s, pids)) - cpu_s
    return {"per_s": num_executions / wall_s, "cpu_ms_each": cpu_s / num_executions * 1000}


async def measure_rates(pool: SandboxPool, num_executions: int) -> dict[str, dict[str, float]]:
    """Twice round all variants; the better of the two, because what else runs here can only slow them down."""
    cores = os.cpu_count() or 1
    floors = [ForkFloor() for _ in range(cores)]
    floor_pids = [floor.pid for floor in floors]
    templates = [pool.template_pid] if pool.template_pid is not None else []

    async def fork() -> float:
        floor = floors.pop()
        seconds = await asyncio.to_thread(floor.sample)
        floors.append(floor)
        return seconds

    variants: dict[str, tuple[Judge, list[int]]] = {
        FLOOR_NAME: (fork, floor_pids),
        BARE_NAME: (lambda: asyncio.to_thread(run_plainly, BARE_PYTHON), []),
        "subprocess python": (lambda: asyncio.to_thread(run_plainly, [PYTHON, "-c", PROGRAM]), []),
        BWRAP_NAME: (lambda: asyncio.to_thread(run_plainly, [*BWRAP, *BARE_PYTHON]), []),
        "judge": (lambda: judge_once(pool), templates),
        "judge, tests of 20 at a time": (lambda: judge_once(pool, num_tests=20), templates),
    }
    if not can_bwrap():
        del variants[BWRAP_NAME]
    rates: dict[str, dict[str, float]] = {}
    for _ in range(2):
        for name, (run, pids) in variants.items():
            batch = 20 if "of 20" in name else 1
            found = await measure_rate(run, max(1, num_executions // batch), cores, pids)
            found = {"per_s": found["per_s"] * batch, "cpu_ms_each": found["cpu_ms_each"] / batch}
            if name == BWRAP_NAME:
                found["cpu_ms_each"] = float("nan")  # what runs inside is spent by processes that nobody here collects
            if name not in rates or found["per_s"] > rates[name]["per_s"]:
                rates[name] = found
    for floor in floors:
        floor.close()
    return rates


async def compare(theirs: Path, source: str, num_rounds: int) -> list[str]:
    """Processor time of the template and its cells for a judgement of one test and for each of 20, a line each.

    Of the version whose `templates.py` this is (with its source), and of this one, which take turns: medians.
    """
    shapes = {"judge": (40, 1), "judge, tests of 20 at a time": (8, 20)}
    here, environment = templates.__file__, dict(templates._ENVIRONMENT)
    async with SandboxPool(SandboxConfig()) as new:
        templates.__file__ = str(theirs)  # where a template's own modules are looked for
        if "LD_BIND_NOW" not in source:
            del templates._ENVIRONMENT["LD_BIND_NOW"]
        try:
            async with SandboxPool(SandboxConfig()) as old:
                pools = (old, new)
                spent: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in shapes}
                for turn in range(num_rounds):
                    for which in (0, 1) if turn % 2 else (1, 0):
                        for name, (count, num_tests) in shapes.items():
                            spent[name][which].append(await spent_ms(pools[which], count, num_tests))
        finally:
            templates.__file__ = here
            templates._ENVIRONMENT.update(environment)
    lines = []
    for name, (before, after) in spent.items():
        ratio = statistics.median(b / a for a, b in zip(before, after, strict=True))
        medians = f"{statistics.median(before):6.2f} {statistics.median(after):6.2f}"
        lines.append(f"{name:32}{medians} CPU-ms each, before and after: {ratio:.2f}")
    return lines


async def spent_ms(pool: SandboxPool, count: int, num_tests: int) -> float:
    """Processor milliseconds a test of the template and its cells, over `count` judgements one after another."""
    assert pool.template_pid is not None
    before_s = tree_cpu_s(pool.template_pid)
    for _ in range(count):
        await judge_once(pool, num_tests=num_tests)
    await asyncio.sleep(0.5)  # the cells that were used have been collected, and others wait
    return (tree_cpu_s(pool.template_pid) - before_s) * 1000 / count / num_tests


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
    floor, bwrap = sorted(times[FLOOR_NAME]), sorted(times.get(BWRAP_NAME, []))
    for name, samples in times.items():
        ordered = sorted(samples)
        p50, p95 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.95)]
        rows[name] = {
            "n": len(ordered),
            "min_ms": ordered[0] * 1000,
            "p50_ms": p50 * 1000,
            "p95_ms": p95 * 1000,
            "p50_to_floor": p50 / floor[len(floor) // 2],
            **({"p50_to_bwrap": p50 / bwrap[len(bwrap) // 2]} if bwrap else {}),
        }
    return rows


@contextlib.contextmanager
def busy_host(num_loops: int) -> Iterator[None]:
    """So many processes beside this one that do nothing but use a processor."""
    loop = [PYTHON, "-I", "-S", "-c", "while True: pass"]
    loops = [subprocess.Popen(loop, start_new_session=True) for _ in range(num_loops)]
    try:
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait()


async def main(num_samples: int, num_executions: int, *, is_brief: bool = False) -> dict[str, Any]:
    config = SandboxConfig(warm=4)
    async with SandboxPool(config) as pool, SandboxPool(SandboxConfig(backend="unsafe", warm=4)) as unsafe:
        floor = ForkFloor()
        plain, judged = plain_variants(floor), judged_variants(pool, unsafe)
        if is_brief:
            plain = {name: run for name, run in plain.items() if name in BRIEF}
            judged = {name: run for name, run in judged.items() if name in BRIEF}
        times = await sample(plain, judged, num_samples)
        floor.close()
        times |= {} if is_brief else await sample_numpy(max(5, num_samples // 5))
        rates = await measure_rates(pool, num_executions)
        await asyncio.sleep(0.5)
        return {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
            "python": platform.python_version(),
            "load_average": os.getloadavg()[0],
            "isolation": pool.isolation.grade,
            "latency": summarize(times),
            "sustained": rates,
            "idle_cell_mb": idle_cell_bytes(pool) / (1 << 20),
        }


def show(found: dict[str, Any]) -> None:
    lines = [f"{found['machine']}, load {found['load_average']:.1f}, isolation {found['isolation']}"]
    lines.append(f"{'':32}{'min ms':>9}{'p50 ms':>9}{'p95 ms':>9}{'p50/floor':>11}")
    for name, row in found["latency"].items():
        figures = f"{row['min_ms']:9.2f}{row['p50_ms']:9.2f}{row['p95_ms']:9.2f}{row['p50_to_floor']:11.1f}"
        figures += f"{row.get('p50_to_bwrap', float('nan')):11.2f}"
        lines.append(f"{name:32}{figures}")
    lines.append(f"{'sustained':32}{'per s':>9}{'CPU ms':>9}{'of floor':>11}")
    floor = found["sustained"][FLOOR_NAME]["per_s"]
    cold_ms = found["sustained"][BARE_NAME]["cpu_ms_each"]
    for name, rate in found["sustained"].items():
        figures = f"{rate['per_s']:9.0f}{rate['cpu_ms_each']:9.2f}{rate['per_s'] / floor:11.2f}"
        lines.append(f"{name:32}{figures}{rate['cpu_ms_each'] / cold_ms:13.2f}")
    lines.append(f"a waiting cell: {found['idle_cell_mb']:.1f} MB")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--executions", type=int, default=200)
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside it, for a loaded host")
    parser.add_argument("--brief", action="store_true", help="only a cold start, bwrap and the judge of Python")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--against", type=Path, help="the src folder of another version")
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    if os.getsid(0) != os.getpid() and shutil.which("setsid"):
        # The kernel's autogroups give each session a share of its own, and a shell's may weigh more than others: the
        # judge's processes have sessions, so that without one of its own this program would favour what it starts.
        os.execvp("setsid", ["setsid", "--wait", sys.executable, *sys.argv])
    if arguments.against:
        theirs = arguments.against.resolve() / "mettle" / "sandbox" / "templates.py"
        sys.stdout.write(
            "\n".join(asyncio.run(compare(theirs, theirs.read_text(encoding="utf-8"), arguments.rounds))) + "\n"
        )
        sys.exit()
    with busy_host(arguments.busy):
        measured = asyncio.run(main(arguments.samples, arguments.executions, is_brief=arguments.brief))
    show(measured)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(measured, indent=1).replace("NaN", "null") + "\n")
