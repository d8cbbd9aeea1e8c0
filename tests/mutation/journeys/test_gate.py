"""The tests of the modules that a run's result rests on find at least 85 % of the small faults put into them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from gate import SEED, TARGETS
from mutants import mutants_of

HERE = Path(__file__).resolve().parents[1]

FLOOR = 0.85
SAMPLE = 60
"""Faults of each module a night, the same ones as long as its source stays as it is."""

TOY = '''
"""A limit."""

LIMIT = 3


def is_allowed(number: int, *, is_strict: bool = False) -> bool:
    """Whether `number` is below the limit."""
    if is_strict:
        raise ValueError("1 < 2 and not 3")
    return number + 1 <= LIMIT


def nobody_tests_this(number):
    return number > 2


def along(array, other):
    assert len(array) == 3
    return zip(array.sum(-1), other.sum(axis=1), strict=True)
'''
TOY_TEST = """
from mettle.toy import is_allowed


def test_the_limit():
    assert is_allowed(1)
    assert is_allowed(2)
    assert not is_allowed(3)
"""


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TARGETS)
def test_the_tests_of_a_module_find_its_faults(name, tmp_path):
    scores = tmp_path / "scores.json"
    command = [sys.executable, str(HERE / "gate.py"), name, "--sample", str(SAMPLE), "--seed", str(SEED)]
    done = subprocess.run([*command, "--json", str(scores)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    score = json.loads(scores.read_text())
    assert score["num_found"] >= FLOOR * score["num_planted"], "\n".join(score["survivors"])


def test_every_kind_of_fault_is_planted_and_what_says_nothing_of_behaviour_is_left_alone():
    tree = ast.parse(TOY)
    assert [(mutant.line, mutant.what) for mutant in mutants_of(tree)] == [
        (4, "`3`: value became 4"),
        (7, "`False`: value became True"),
        (9, "`is_strict`: test became its opposite"),
        (11, "`number + 1 <= LIMIT`: LtE became Lt"),
        (11, "`number + 1`: op became Sub"),
        (11, "`1`: value became 2"),
        (15, "`number > 2`: Gt became GtE"),
        (15, "`2`: value became 3"),
    ]
    before = ast.dump(tree)
    planted = {ast.unparse(mutant.plant(tree)) for mutant in mutants_of(tree)}
    assert len(planted) == 8
    assert ast.unparse(tree) not in planted
    assert ast.dump(tree) == before


def test_a_fault_is_found_or_survives_by_what_the_tests_say(tmp_path):
    (tmp_path / "src" / "mettle").mkdir(parents=True)
    (tmp_path / "src" / "mettle" / "toy.py").write_text(TOY)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_toy.py").write_text(TOY_TEST)
    code = (
        "import sys; from pathlib import Path; from dataclasses import asdict; import json; from gate import *\n"
        f"score = measure('toy', Target('toy.py', ('test_toy.py',)), sample=99, root=Path({str(tmp_path)!r}))\n"
        "print(json.dumps(asdict(score)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    score = json.loads(done.stdout)
    assert (score["num_planted"], score["num_found"]) == (8, 6)
    assert [line.partition(" |")[0] for line in score["survivors"]] == [
        "toy.py:15 `number > 2`: Gt became GtE",
        "toy.py:15 `2`: value became 3",
    ]
