"""Hostile code: nothing that it does may reach the host, and the same checks fail where nothing isolates it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from arena import a_sixth, attack_as_test, broken, open_plant, traces_of_test
from attacks import ATTACKS, Attack
from planted import Planted

from mettle.sandbox import SandboxPool, StdioTest

pytestmark = pytest.mark.asyncio(loop_scope="module")

IS_ROOT = os.geteuid() == 0
OPEN_WITHOUT_ISOLATION = [attack for attack in ATTACKS if attack.gets_through(is_root=IS_ROOT)]


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[Planted]:
    with open_plant(tmp_path) as things:
        yield things


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_contained(pool: SandboxPool, planted: Planted, attack: Attack) -> None:
    result = await attack_as_test(pool, attack, planted)
    assert traces_of_test(result, planted) == []
    assert broken(result.stderr) == []
    assert (await pool.judge("print(1)", [StdioTest("", "1")])).has_passed


@pytest.mark.parametrize("attack", a_sixth(OPEN_WITHOUT_ISOLATION))
async def test_gets_through_without_isolation(unsafe_pool: SandboxPool, planted: Planted, attack: Attack) -> None:
    """Proof that each check above can fail: a sixth of them each time, all in the nightly tier."""
    result = await attack_as_test(unsafe_pool, attack, planted)
    assert traces_of_test(result, planted) != [], result


async def test_without_isolation_every_result_says_so(unsafe_pool: SandboxPool) -> None:
    result = await unsafe_pool.judge("print(1)", [StdioTest("", "1")])
    assert result.isolation.backend == "unsafe"
    assert result.isolation.grade == "none"


async def test_the_suite_is_large_enough_and_most_of_it_can_fail() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 100
    can_fail = [attack for attack in ATTACKS if attack.opens and not attack.is_harmful]
    assert len(can_fail) >= 80


async def test_every_attack_says_what_must_be_true_and_why_it_may_not_succeed_without_isolation() -> None:
    assert [attack.name for attack in ATTACKS if not attack.must] == []
    silent = [attack.name for attack in ATTACKS if (attack.is_harmful or not attack.opens) and not attack.off]
    assert silent == []
