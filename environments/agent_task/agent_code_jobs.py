"""Jobs with code: a mistake to repair, or a function to write, in a project of three modules.

Parts: `repair`, `implement`. The tests that the project shows are not those that count. Invariant: what a function must
return is what the right source returns for arguments drawn here.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from agent_job import Call, Draft, Job, Step, is_same
from agent_parts import PARTS, Part

NUM_MODULES = 3
NUM_SHOWN, NUM_HIDDEN = 3, 5
NUM_DRAWS = 150
FAILED = object()
TESTS_HEAD = '''"""Run `python3 tests.py`: it names what fails and ends with exit code 1 if anything does."""

import sys
import traceback

num_failed = 0


def check(module, function, args, expected):
    global num_failed
    try:
        found = getattr(__import__(module), function)(*args)
    except Exception:
        found = traceback.format_exc(limit=-1)
    if found != expected:
        num_failed += 1
        print(f"FAILED {module}.{function}{args!r}: expected {expected!r}, found {found!r}")


'''


def repair(rng: random.Random) -> Draft:
    """Mistakes in one or two of the modules."""
    parts = rng.sample(PARTS, NUM_MODULES)
    broken = {part.name: mistaken(part, *rng.choice(part.mistakes)) for part in parts[: rng.randint(1, 2)]}
    told = (
        "Some of the checks in `tests.py` fail, because there are mistakes in the modules. Repair the modules so that "
        "every function does what its docstring says. Other inputs than those in `tests.py` are tried, too."
    )
    return Draft(told, lambda: _job(rng, parts, broken))


def implement(rng: random.Random) -> Draft:
    """A function that is still to be written."""
    parts = rng.sample(PARTS, NUM_MODULES)
    function = rng.choice(sorted(parts[0].functions))
    broken = {parts[0].name: without_body(parts[0].source, function)}
    told = (
        f"The function `{function}` of `{parts[0].name}.py` is not written yet. Write it as its docstring says. "
        "`tests.py` has some examples; other inputs are tried, too. Do not change what the other functions do."
    )
    return Draft(told, lambda: _job(rng, parts, broken))


def mistaken(part: Part, right: str, wrong: str) -> str:
    """The source with a mistake."""
    assert right in part.source, f"{part.name} has no {right!r}"
    return part.source.replace(right, wrong, 1)


def without_body(source: str, function: str) -> str:
    """The source with a function that has only its docstring."""
    rows = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            rows[node.body[0].end_lineno : node.end_lineno] = ["    raise NotImplementedError"]
    return "\n".join(rows) + "\n"


def _job(rng: random.Random, parts: Sequence[Part], broken: dict[str, str]) -> Job:
    """The project, with calls drawn for each function."""
    shown, goals, guards = [], [], []
    for part in parts:
        given, wrong, right = _calls(rng, part, broken.get(part.name, part.source))
        shown += given
        goals += wrong
        guards += right
    rng.shuffle(shown)
    sources = {f"{part.name}.py": broken.get(part.name, part.source) for part in parts}
    tests = [f"check({c.module!r}, {c.function!r}, {c.args!r}, {c.expected!r})" for c in shown]
    tests_source = TESTS_HEAD + "\n".join(tests) + '\nprint(f"{num_failed} failed")\nsys.exit(num_failed > 0)\n'
    cured = [
        step
        for part in parts
        if part.name in broken
        for step in (
            Step("read_file", {"path": f"{part.name}.py"}),
            Step("write_file", {"path": f"{part.name}.py", "content": part.source}),
        )
    ]
    return Job(
        {**sources, "tests.py": tests_source},
        (Step("run", {"command": "ls; python3 tests.py"}), *cured, Step("run", {"command": "python3 tests.py"})),
        tuple(goals),
        tuple(guards),
    )


def _calls(rng: random.Random, part: Part, source: str) -> tuple[list[Call], list[Call], list[Call]]:
    """Calls to show, and hidden ones that `source` gets wrong and right; where there is a mistake, both have some."""
    shown, wrong, right = [], [], []
    for function, make in part.functions.items():
        all_right: list[Call] = []
        all_wrong: list[Call] = []
        for _ in range(NUM_DRAWS):
            args = make(rng)
            expected = outcome(part.source, function, args)
            call = Call(part.name, function, args, expected)
            known = [*all_right, *all_wrong]
            if any(repr(args) == repr(other.args) for other in known):
                continue
            is_right = is_same(outcome(source, function, args), expected)
            (all_right if is_right else all_wrong).append(call)
            if len(all_right) >= NUM_HIDDEN and (source == part.source or len(all_wrong) >= NUM_SHOWN + NUM_HIDDEN):
                break
        num_shown = min(NUM_SHOWN, (len(all_wrong) + 1) // 2)
        shown += all_wrong[:num_shown] or all_right[:NUM_SHOWN]
        wrong += all_wrong[num_shown : num_shown + NUM_HIDDEN]
        right += all_right[:NUM_HIDDEN]
    return shown, wrong, right


def outcome(source: str, function: str, args: tuple[Any, ...]) -> Any:
    """What a function of this package's own sources returns; `FAILED` if it raises."""
    try:
        return module(source)[function](*copy.deepcopy(args))
    except Exception:
        return FAILED


@lru_cache(256)
def module(source: str) -> dict[str, Any]:
    """The names of a source. Its functions keep nothing from call to call."""
    names: dict[str, Any] = {}
    exec(source, names)
    return names
