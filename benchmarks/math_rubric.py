"""What verifying mathematics costs the event loop: verifications per second, and how late the loop turns meanwhile.

512 rollouts in 64 groups are scored at once, three ways in one run: `in the loop` calls math_verify from an
asynchronous reward function, as published environments do; `plain function` is the same code as a reward function that
is not asynchronous, which `Rubric` moves to a thread by itself; `MathRubric` uses its worker processes. No answer is a
plain integer, which MathRubric would compare without math_verify. The number that matters is the lag's p99, beside the
ratio of verifications per second.

Run: `python benchmarks/math_rubric.py [--num 512] [--json FILE]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from math_verify import parse, verify

import mettle.envs as vf
from mettle.envs.parsers.answers import extract_boxed_answer
from mettle.envs.state import State, new_state

GROUP_SIZE = 8
NUM_REPEATS = 3
TICK_S = 0.002


def make_states(num: int) -> list[list[State]]:
    """Groups of finished rollouts, half of them right."""
    states = []
    for i in range(num):
        answers = [
            (f"\\frac{{{i}}}{{7}}", f"{i}/7"),
            (f"x^2+{i}x", f"x(x+{i})"),
            (f"{i}.5", f"\\frac{{{2 * i + 1}}}{{2}}"),
        ]
        answer, right = answers[i % 3]
        said = right if i % 2 else "y+1"
        state = new_state({"prompt": [], "answer": answer}, None, "m", {}, [])
        state["completion"] = [vf.AssistantMessage(content=f"So it is \\boxed{{{said}}}.")]
        states.append(state)
    return [states[i : i + GROUP_SIZE] for i in range(0, num, GROUP_SIZE)]


def equal(answer: str, said: str) -> float:
    """Math-verify as it is, without its own timer, which works in the main thread only."""
    gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    return float(verify(gold, parse(f"\\boxed{{{said}}}", parsing_timeout=None), timeout_seconds=None))


async def correct(completion: Any, answer: str) -> float:
    """An asynchronous reward that never waits for anything."""
    return equal(answer, extract_boxed_answer(completion[-1].content))


def plainly_correct(completion: Any, answer: str) -> float:
    """The same, not asynchronous."""
    return equal(answer, extract_boxed_answer(completion[-1].content))


RUBRICS: dict[str, Callable[[], vf.Rubric]] = {
    "in the loop": lambda: vf.Rubric([correct]),
    "plain function": lambda: vf.Rubric([plainly_correct]),
    "MathRubric": vf.MathRubric,
}


async def measure(rubric: vf.Rubric, num: int) -> dict[str, float]:
    """Score `num` rollouts, after a few that warm everything up."""
    await asyncio.gather(*(rubric.score_group(group) for group in make_states(4 * GROUP_SIZE)))
    groups, lags = make_states(num), []
    started, before = time.perf_counter(), time.process_time()
    scoring = asyncio.gather(*(rubric.score_group(group) for group in groups))
    while not scoring.done():
        tick = time.perf_counter()
        await asyncio.sleep(TICK_S)
        lags.append((time.perf_counter() - tick - TICK_S) * 1e3)
    await scoring
    seconds = time.perf_counter() - started
    assert sum(state["reward"] for group in groups for state in group) == num // 2, "half of the answers are right"
    lags.sort()
    return {
        "per_s": num / seconds,
        "loop_cpu_ms": (time.process_time() - before) / num * 1e3,
        "lag_p50_ms": statistics.median(lags),
        "lag_p99_ms": lags[int(len(lags) * 0.99)],
        "lag_max_ms": lags[-1],
    }


def repeated(num: int) -> dict[str, dict[str, float]]:
    """The median over repeats of every figure, the ways taking turns."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in RUBRICS}
    for _ in range(NUM_REPEATS):
        for name, make in RUBRICS.items():
            rows[name].append(asyncio.run(measure(make(), num)))
    table = {
        name: {key: statistics.median(row[key] for row in measured) for key in measured[0]}
        for name, measured in rows.items()
    }
    for row in table.values():
        row["speed_ratio"] = row["per_s"] / table["in the loop"]["per_s"]
    return table


def main() -> None:
    """Measure, print a table, write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=512)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = repeated(args.num)
    print(
        f"{'':<16}{'per s':>9}{'/ loop':>8}{'CPU-ms':>9}{'lag p50':>10}{'p99':>10}{'max':>10}  ms; CPU of this process"
    )
    for name, row in table.items():
        lags = f"{row['lag_p50_ms']:>10.1f}{row['lag_p99_ms']:>10.1f}{row['lag_max_ms']:>10.1f}"
        print(f"{name:<16}{row['per_s']:>9.0f}{row['speed_ratio']:>8.2f}{row['loop_cpu_ms']:>9.2f}{lags}")
    if args.json:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
        result = {**machine, "commit": done.stdout.strip(), "num": args.num, "repeats": NUM_REPEATS, "median": table}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
