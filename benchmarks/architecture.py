"""What the house weighs, and how often each concept stands in it: one table, for one tree or for two side by side.

    python benchmarks/architecture.py                      this tree
    python benchmarks/architecture.py --before OTHER/CLONE that tree beside this one

Parts: `Static` figures are read off the source with `ast`; `walks` are counted by running one evaluation and one
optimiser step in a process of their own and watching which functions are called. Concepts are counted by what only one
home of each may do: define pass@k (an estimator), run groups side by side (a runner), read pip-style tables of settings
by hand (a validator). The patterns are below, so that a count can be argued with.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]

ESTIMATOR = re.compile(r"^def (clustered_mean|mean_over_tasks|pass_at_k)\(", re.MULTILINE)
"""A module that turns rewards into a mean with an interval, or into pass@k."""

RUNNER = re.compile(r"create_task|asyncio\.gather")
ROLLS_OUT = re.compile(r"\.run_(group|rollout)\(")
"""A module that starts rollouts side by side and asks an environment, or a source of rollouts, for them itself."""
NO_EVALUATION = {
    "envs/workers/worker.py": "a worker process runs what it is sent",
    "orchestrator/groups.py": "training's groups, under the ledger",
}

STORE = re.compile(r"INSERT (OR \w+ )?INTO rollouts\b|def take_over\(\s*folder")
"""A module that keeps rollouts so that an interrupted run goes on from them."""

VALIDATOR = re.compile(
    r"^def (_settings?\(layer|_check_keys\(|whole\(least|take\(body|explain\(error|checked\(model)|^class Body\b",
    re.MULTILINE,
)
"""A module that checks keys and types of settings or of a request, by hand or for a model, with lines of its own."""


class Static:
    """Figures of one source tree."""

    def __init__(self, root: Path) -> None:
        self.root = root
        source = root / "src" / "mettle"
        self.files = {path.relative_to(source): path.read_text(encoding="utf-8") for path in source.rglob("*.py")}

    def rooms(self) -> dict[str, tuple[int, int]]:
        """Lines and files by room."""
        lines: Counter[str] = Counter()
        files: Counter[str] = Counter()
        for path, text in self.files.items():
            room = path.parts[0].removesuffix(".py")
            lines[room] += text.count("\n")
            files[room] += 1
        return {room: (lines[room], files[room]) for room in sorted(lines, key=lambda room: -lines[room])}

    def repeated_class_names(self) -> dict[str, list[str]]:
        """Public top-level classes that share a name, with the modules they stand in."""
        homes: defaultdict[str, list[str]] = defaultdict(list)
        for path, text in self.files.items():
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes[node.name].append(str(path))
        return {name: places for name, places in sorted(homes.items()) if len(places) > 1}

    def modules(self, *patterns: re.Pattern[str]) -> list[str]:
        """Modules in which every pattern is found."""
        return sorted(str(p) for p, text in self.files.items() if all(pattern.search(text) for pattern in patterns))

    def circles(self) -> list[str]:
        """Rooms in which some files need each other to be read, imports inside functions included."""
        found = []
        for room in self.rooms():
            members = {self._module(path): text for path, text in self.files.items() if path.parts[0] == room}
            graph = {name: self._imported(text, name) & members.keys() for name, text in members.items()}
            while leaves := [name for name, needed in graph.items() if not needed & graph.keys()]:
                for name in leaves:
                    del graph[name]
            if graph:
                found.append(room)
        return found

    def comments_per_1000(self) -> float:
        """Lines that hold a comment, in a thousand."""
        texts = self.files.values()
        comments = sum(len(re.findall(r"(?m)^\s*#|  # ", text)) for text in texts)
        return 1000 * comments / sum(text.count("\n") for text in texts)

    def tests_in_place(self) -> tuple[int, int]:
        """Test files whose path is that of a module or a package, and test files that are no journeys."""
        found = [p.relative_to(self.root / "tests") for p in (self.root / "tests").rglob("test_*.py")]
        tests = [path for path in found if path.parent.name != "journeys"]
        modules = {(path.parent if path.stem == "__init__" else path.with_suffix("")) for path in self.files}
        return sum(path.with_name(path.stem.removeprefix("test_")) in modules for path in tests), len(tests)

    def _module(self, path: Path) -> str:
        return ".".join(("mettle", *path.with_suffix("").parts)).removesuffix(".__init__")

    def _imported(self, text: str, own: str) -> set[str]:
        known = {self._module(path) for path in self.files}
        found: set[str] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= (names & known) | ({node.module} if names - known else set())
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        return found - {own}


ROLLOUT_WALK = '''
import asyncio, json, sys, threading
import mettle, mettle.envs as vf
from pathlib import Path
ROOT = str(Path(mettle.__file__).parent)
base, deepest, files, is_on = {}, 0, set(), False

def depth():
    frame, count = sys._getframe(1), 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith(ROOT)
        frame = frame.f_back
    return count

def factory(loop, work, **options):
    """Remembers how deep the caller of a task stood: its frames lead to the request too."""
    above = base.get(asyncio.current_task(), 0) if loop.is_running() else 0
    task = asyncio.Task(work, loop=loop, **options)
    base[task] = above + depth()
    return task

class Endpoint:
    """Answers at once: what an environment's own frames need."""
    base_url = "http://127.0.0.1/v1"
    async def get_response(self, *args, **options):
        from mettle.records.messages import AssistantMessage, Response
        return Response(id="1", created=0, model="m", message=AssistantMessage(content="x"))
    async def close(self): ...

async def refuse(session, *args, **options):
    """Stands where the request would leave for the network."""
    global deepest
    deepest = max(deepest, depth() + base.get(asyncio.current_task(), 0))
    import aiohttp
    raise aiohttp.ClientError("counted")

def watch(code, _):
    if is_on and code.co_filename.startswith(ROOT):
        files.add(code.co_filename[len(ROOT) + 1:])

def profile(frame, event, _):
    if event == "call":
        watch(frame.f_code, 0)

async def main():
    global is_on
    asyncio.get_running_loop().set_task_factory(factory)
    env = vf.SingleTurnEnv(
        dataset=[{"question": "q", "answer": "x"}] * 2,
        rubric=vf.Rubric(funcs=[lambda completion, answer, **kwargs: float(answer == completion[-1]["content"])]),
    )
    import aiohttp
    aiohttp.ClientSession._request = refuse
    config = vf.ClientConfig(api_base_url="http://127.0.0.1:9/v1", max_retries=0)
    await env.evaluate(config, "m", num_examples=1)
    row = env.get_eval_dataset()[0]
    is_on = True
    sys.setprofile(profile)
    await env.run_group([dict(row)], Endpoint(), "m", {})
    sys.setprofile(None)
asyncio.run(main())
print(json.dumps({"frames": deepest, "files": sorted(files)}))
'''


def walk(root: Path, code: str) -> dict[str, Any]:
    """What a probe in a process of its own counted; an error is its last line."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["it said nothing"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def figures(root: Path) -> dict[str, Any]:
    """Everything about one tree."""
    static = Static(root)
    rooms = static.rooms()
    repeated = static.repeated_class_names()
    rollout = walk(root, ROLLOUT_WALK)
    step = walk(root, (HERE / "benchmarks" / "optimiser_step_files.py").read_text())
    in_place, num_tests = static.tests_in_place()
    return {
        "lines": sum(lines for lines, _ in rooms.values()),
        "files": sum(files for _, files in rooms.values()),
        "rooms": {room: list(values) for room, values in rooms.items()},
        "estimators": static.modules(ESTIMATOR),
        "runners": [path for path in static.modules(RUNNER, ROLLS_OUT) if path not in NO_EVALUATION],
        "stores": static.modules(STORE),
        "validators": static.modules(VALIDATOR),
        "class names with several meanings": repeated,
        "rooms with circles": static.circles(),
        "comments in 1000 lines": round(static.comments_per_1000(), 1),
        "tests beside what they test": f"{in_place} of {num_tests}",
        "frames from env.evaluate to the request": rollout.get("frames", rollout.get("error")),
        "files run for a rollout": rollout.get("files", rollout.get("error")),
        "files run for an optimiser step": step.get("files", step.get("error")),
    }


def rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Figures as a table shows them: a list by its length."""
    for name, value in found.items():
        if name != "rooms":
            yield name, str(len(value)) if isinstance(value, list | dict) else str(value)
    for room, (lines, files) in found["rooms"].items():
        yield f"  {room}", f"{lines} in {files}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another clone, shown beside this one")
    parser.add_argument("--json", type=Path, help="write all lists there")
    parser.add_argument("--lists", action="store_true", help="print what was counted, too")
    given = parser.parse_args()
    now = figures(HERE)
    before = figures(given.before.resolve()) if given.before else None
    shown = dict(rows(now))
    earlier = dict(rows(before)) if before else {}
    for name in [*shown, *(name for name in earlier if name not in shown)]:
        print(f"{name:<40}{earlier.get(name, ''):>16}{shown.get(name, '-'):>16}")
    if given.lists:
        print(json.dumps({k: v for k, v in now.items() if k != "rooms"}, indent=1))
    if given.json:
        given.json.write_text(json.dumps({"before": before, "now": now}, indent=1) + "\n")


if __name__ == "__main__":
    main()
