"""What becomes of a rank is what its launcher says: the exit code, and one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mettle.trainer.ranks import ENVIRONMENT, LAUNCHER, code_of, launcher_arguments

pytestmark = pytest.mark.usefixtures("forked")
WAITS = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(60)"


@pytest.mark.parametrize(
    ("first", "second", "code", "line"),
    [
        ("print('x is wrong', file=sys.stderr); sys.exit(2)", WAITS, 2, "x is wrong"),
        ("raise ValueError('oh')", WAITS, 1, "ValueError: oh"),
        (WAITS, "os.kill(os.getpid(), 9)", 1, "rank 1 was ended by SIGKILL"),
        ("pass", "pass", 0, None),
    ],
)  # fmt: skip
def test_the_launcher_ends_as_its_ranks_do(tmp_path, first, second, code, line):
    script = tmp_path / "rank.py"
    script.write_text(f"import os, sys, time\nif os.environ['RANK'] == '0':\n    {first}\nelse:\n    {second}\n")
    done = subprocess.run(
        [sys.executable, "-m", LAUNCHER, *launcher_arguments(2), str(script)],
        env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    if line is not None:
        assert done.stderr.strip().splitlines()[-1] == line
    assert "ChildFailedError" not in done.stderr


def test_a_rank_that_ended_on_purpose_goes_before_those_that_ended_of_it():
    assert [code_of(codes) for codes in ([1, 3], [-15, 2], [1, -9], [-6])] == [3, 2, 1, 1]
