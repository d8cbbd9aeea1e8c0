"""Hostile code: nothing that it does may reach the host, and the same checks fail where nothing isolates it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacks import ATTACKS, PRELUDE, Attack
from planted import SECRET, Planted, plant

from mettle.sandbox import SandboxPool, StdioTest, TestResult, Verdict

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPEN_WITHOUT_ISOLATION = [
    attack
    for attack in ATTACKS
    if not attack.is_harmful and (attack.opens == "any" or (attack.opens == "root" and os.geteuid() == 0))
]


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[Planted]:
    for parent in (tmp_path, *tmp_path.parents):  # so that only isolation, and no file mode, protects what is planted
        if parent.stat().st_uid == os.geteuid() and parent.is_relative_to("/tmp") and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o055)
    with plant(tmp_path) as things:
        yield things


async def run_attack(pool: SandboxPool, attack: Attack, planted: Planted) -> TestResult:
    test = StdioTest(planted.describe(), "")
    if attack.first:
        await pool.judge(PRELUDE + attack.first, [test])
    result = await pool.judge(PRELUDE + attack.code, [test])
    return result.tests[0]


def traces(result: TestResult, planted: Planted) -> list[str]:
    """Everything that shows that an attack got through."""
    found = planted.damage()
    if "BREACH" in result.stdout:
        found.append(result.stdout.strip())
    if SECRET in result.stdout + result.stderr:
        found.append("the secret was read")
    if result.verdict is Verdict.KILLED and "cell" in result.detail:
        found.append("process 1 was ended by the code")
    return found


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_contained(pool: SandboxPool, planted: Planted, attack: Attack) -> None:
    result = await run_attack(pool, attack, planted)
    assert traces(result, planted) == []
    assert "NameError" not in result.stderr, "the attack's own code is broken"
    assert "SyntaxError" not in result.stderr, "the attack's own code is broken"
    assert (await pool.judge("print(1)", [StdioTest("", "1")])).has_passed


@pytest.mark.parametrize("attack", OPEN_WITHOUT_ISOLATION, ids=lambda attack: attack.name)
async def test_gets_through_without_isolation(unsafe_pool: SandboxPool, planted: Planted, attack: Attack) -> None:
    """Proof that each check above can fail."""
    result = await run_attack(unsafe_pool, attack, planted)
    assert traces(result, planted) != [], result


async def test_without_isolation_every_result_says_so(unsafe_pool: SandboxPool) -> None:
    result = await unsafe_pool.judge("print(1)", [StdioTest("", "1")])
    assert result.isolation.backend == "unsafe"
    assert result.isolation.grade == "none"


async def test_the_suite_is_large_enough_and_most_of_it_can_fail() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 60
    can_fail = [attack for attack in ATTACKS if attack.opens and not attack.is_harmful]
    assert len(can_fail) >= 45
