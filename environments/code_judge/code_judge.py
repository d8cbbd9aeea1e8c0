"""Programming problems, judged in the sandbox: functions called with arguments, programs fed standard input.

Two of a problem's ten tests stand in its statement; the others, and all expected outputs, never enter the process that
runs the model's code. Problems are made here, offline; MBPP is taken instead when asked for by name. A problem belongs
to the evaluation split by the checksum of its statement.
"""

from __future__ import annotations

import ast
import json
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice, zip_longest
from typing import Any

from code_classics import classic_problems
from code_formulas import careless, formula_problems
from code_pipelines import pipeline_problems
from code_problem import Problem, show

import mettle.envs as vf
from mettle.sandbox import SandboxConfig

SYSTEM_PROMPT = "Solve the problem in Python. Think it over, then give the whole program in one ```python block."
EVAL_SHARE = 5
"""One problem in so many is for evaluation."""
NUM_SHOWN = 2
KINDS = ("functions", "programs")
"""Those of `kinds` when nothing is said; the formulas have to be asked for."""
FORMULAS = "formulas"
ANSWER_FORMATS = ("block", "bare")
SHOWN = ("right", "careless")
MAX_REPEATS = 10_000


def make_rows(num_rows: int, *, for_eval: bool, kinds: list[str], num_shown: int, seed: int) -> list[dict[str, Any]]:
    """Different problems of one split, or as many as there are; programs are at most half, because there are fewer."""
    rng = random.Random(f"{seed}/{for_eval}/{sorted(kinds)}")
    programs = classic_problems(random.Random(seed)) if "programs" in kinds else []
    most = num_rows if kinds == ["programs"] else num_rows // 2
    first = [problem for problem in programs if in_eval(problem) == for_eval][:most]
    rest = [pipeline_problems(rng)] if "functions" in kinds else []
    rest += [islice(formula_problems(rng), MAX_REPEATS)] if FORMULAS in kinds else []
    rows: dict[str, dict[str, Any]] = {}
    for problem in chain(first, in_turns(rest)):
        if len(rows) >= num_rows:
            break
        if in_eval(problem) == for_eval and problem.statement not in rows:
            rows[problem.statement] = row_of(problem, num_shown, random.Random(problem.statement))
    made = list(rows.values())
    rng.shuffle(made)
    return made


def in_turns(sources: list[Iterator[Problem]]) -> Iterator[Problem]:
    """One of each source after the other, until all are at their end."""
    return (problem for drawn in zip_longest(*sources) for problem in drawn if problem is not None)


def in_eval(problem: Problem) -> bool:
    """Whether the problem belongs to the evaluation split."""
    return zlib.crc32(problem.statement.encode()) % EVAL_SHARE == 0


def row_of(problem: Problem, num_shown: int, rng: random.Random) -> dict[str, Any]:
    """The statement with its first examples, and all tests."""
    tests = problem.tests(rng)
    # Not the empty input: it shows least.
    examples = "".join(f"\n\n{show(test)}" for test in tests[2 : 2 + num_shown])
    info = {"tests": json.dumps(tests), "family": problem.family}
    question = f"{problem.statement}\n\nExamples:{examples}" if examples else problem.statement
    return {"question": question, "answer": problem.solution, "info": info}


def public_rows(split: str, num_rows: int) -> Iterator[dict[str, Any]]:
    """Rows of sanitized MBPP whose tests are plain comparisons of a call with a value."""
    from datasets import load_dataset

    count = 0
    for row in load_dataset("google-research-datasets/mbpp", "sanitized", split=split):
        tests = [test for line in row["test_list"] if (test := call_test(line)) is not None]
        if tests and count < num_rows:
            count += 1
            question = f"{row['prompt']}\n\nExample:\n\n{show(tests[0])}"
            yield {"question": question, "answer": row["code"], "info": {"tests": json.dumps(tests), "family": "mbpp"}}


def call_test(line: str) -> dict[str, Any] | None:
    """`assert f(1, 2) == 3` as data; None for an assertion of another shape, or of values that JSON does not keep."""
    try:
        match ast.parse(line).body:
            case [ast.Assert(ast.Compare(ast.Call(ast.Name(function), args, []), [ast.Eq()], [expected]))]:
                values = [ast.literal_eval(argument) for argument in args]
                test = {"function": function, "args": values, "expected": ast.literal_eval(expected)}
                return test if json.loads(json.dumps(test)) == test else None
    except (SyntaxError, TypeError, ValueError):
        return None
    return None


def demonstrations(shown: str, *, is_bare: bool) -> Callable[[list[Any], Mapping[str, Any]], str]:
    """What shows the problem's own solution, or that of somebody "careless"."""

    def demonstrate(messages: list[Any], row: Mapping[str, Any]) -> str:
        code = row["answer"]
        if shown == "careless":
            code = careless(code, random.Random(row["question"]))
        return code.strip() if is_bare else vf.CodeParser().format(code)

    return demonstrate


def load_environment(
    source: str = "made",
    kinds: list[str] | None = None,
    partial_credit: bool = False,
    answer_format: str = "block",
    num_shown: int = NUM_SHOWN,
    shown: str = "right",
    num_train: int = 1000,
    num_eval: int = 100,
    timeout_s: float = 4.0,
    memory_mb: int = 256,
    max_remembered: int = 0,
    seed: int = 0,
) -> vf.SingleTurnEnv:
    """Problems made here, or of MBPP with `source="mbpp"`; `kinds` are `functions`, `programs` and `formulas`."""
    kinds = kinds or list(KINDS)
    known = (*KINDS, FORMULAS)
    if source not in ("made", "mbpp") or not set(kinds) <= set(known):
        raise ValueError(f"source is made or mbpp, kinds are some of {known}, not {source!r} and {kinds}")
    if answer_format not in ANSWER_FORMATS or shown not in SHOWN:
        raise ValueError(
            f"answer_format is one of {ANSWER_FORMATS}, shown of {SHOWN}, not {answer_format!r}, {shown!r}"
        )
    if shown == "careless" and kinds != [FORMULAS]:
        raise ValueError(f"only {FORMULAS} are shown carelessly, not {kinds}")
    is_bare = answer_format == "bare"

    def rows(*, for_eval: bool) -> list[dict[str, Any]]:
        number = num_eval if for_eval else num_train
        if source == "mbpp":
            return list(public_rows("test" if for_eval else "train", number))
        return make_rows(number, for_eval=for_eval, kinds=kinds, num_shown=num_shown, seed=seed)

    rubric = vf.CodeRubric(
        parser=vf.Parser() if is_bare else None,
        sandbox=SandboxConfig(max_remembered=max_remembered),
        timeout_s=timeout_s,
        memory_mb=memory_mb,
        partial_credit=partial_credit,
    )
    return vf.SingleTurnEnv(
        dataset=lambda: rows(for_eval=False),
        eval_dataset=lambda: rows(for_eval=True),
        system_prompt=None if is_bare else SYSTEM_PROMPT,
        parser=rubric.parser,
        rubric=rubric,
        demonstrate=demonstrations(shown, is_bare=is_bare),
    )
