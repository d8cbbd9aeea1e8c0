"""Limits of the process that owns the sandboxes are named where they are the cause, and never raised."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest

from mettle.sandbox import own_limits

MIB = 2**20
ASK = "from mettle.sandbox.own_limits import limits_hint; print(limits_hint())"
JUDGE = """
import asyncio, json
from mettle.sandbox import SandboxConfig, SandboxPool, StdioTest
async def main():
    async with SandboxPool(SandboxConfig(warm=1, memory_mb=4096)) as judge:
        result = await judge.judge("print(input())", [StdioTest("a", "a")])
        print(json.dumps([r.verdict for r in result.tests]))
asyncio.run(main())
"""


def said(code: str, *limits: tuple[int, int]) -> str:
    def lower():
        for kind, value in limits:
            resource.setrlimit(kind, (value, value))

    done = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=lower, capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout.strip()


def test_a_shell_without_limits_is_not_spoken_of(monkeypatch):
    monkeypatch.setattr(own_limits.resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert own_limits.limits_hint() == ""


@pytest.mark.parametrize(("user", "is_named"), [(0, False), (1000, True)])
def test_the_number_of_processes_is_named_to_those_whom_it_binds(monkeypatch, user, is_named):
    limits = {resource.RLIMIT_NPROC: (12, 12)}
    monkeypatch.setattr(own_limits.resource, "getrlimit", lambda kind: limits.get(kind, (resource.RLIM_INFINITY,) * 2))
    monkeypatch.setattr(own_limits.os, "geteuid", lambda: user)
    assert ("ulimit -u 12 (sandboxes want 256)" in own_limits.limits_hint()) == is_named


def test_limits_are_said_as_the_shell_takes_them():
    hint = said(ASK, (resource.RLIMIT_AS, 1024 * MIB), (resource.RLIMIT_FSIZE, 0))
    assert "ulimit -v 1048576 (sandboxes want 2097152)" in hint
    assert "ulimit -f 0 (sandboxes want 65536)" in hint


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's address space is measured otherwise")
def test_code_is_judged_under_hard_limits_of_the_owner_that_are_lower_than_the_test_s_own():
    """A limit of a test is never put above the owner's hard one, which the kernel refuses to an ordinary process."""
    assert json.loads(said(JUDGE, (resource.RLIMIT_AS, 3072 * MIB))) == ["passed"]
