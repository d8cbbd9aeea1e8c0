"""What a caller can get wrong, and what a host can lack: one clear error each, and the pool judges rightly afterwards."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mettle.errors import SandboxError, UserError
from mettle.sandbox import SandboxConfig, SandboxPool, StdioTest, Verdict

pytestmark = pytest.mark.asyncio(loop_scope="module")

RIGHT = StdioTest("", "1")
BAD = {
    "an unknown language": ({"language": "cobol"}, "does not run 'cobol'; it runs python, bash, javascript, c, cpp"),
    "no language": ({"language": None}, "does not run None"),
    "bytes": ({"code": b"print(1)"}, "code must be text, not bytes"),
    "nothing": ({"code": None}, "code must be text, not NoneType"),
    "half a surrogate pair": ({"code": "print('\ud800')"}, "character 7 is half of a surrogate pair"),
    "100 MB of source": ({"code": "#" * (100 << 20)}, "104,857,600 characters; sandbox.max_source_kb"),
    "source that is too long as bytes": ({"code": "\u20ac" * (400 << 10)}, "1,228,800 bytes; sandbox.max_source_kb"),
    "100 MB of input": ({"tests": [StdioTest(b"x" * (100 << 20))]}, "test 0 has 104,857,600 bytes; sandbox.max_input"),
    "input that is no text": ({"tests": [StdioTest("\ud800")]}, "test 0: stdin must be text: character 0"),
    "expected output that is no text": ({"tests": [StdioTest("", 3)]}, "test 0: expected must be text or bytes"),
    "a negative time": ({"timeout_s": -1}, "timeout_s is -1"),
    "no time": ({"timeout_s": 0}, "timeout_s is 0"),
    "a time that is no number": ({"timeout_s": float("nan")}, "timeout_s is nan"),
    "endless time": ({"timeout_s": float("inf")}, "timeout_s is inf"),
    "time as text": ({"timeout_s": "3"}, "timeout_s is '3'"),
    "negative memory": ({"memory_mb": -1}, "memory_mb is -1"),
    "memory that is no number": ({"memory_mb": float("nan")}, "memory_mb is nan"),
    "memory for nothing": ({"memory_mb": 1}, "must be a whole number of at least 32"),
    "no tests": ({"tests": []}, "no tests"),
    "a test that is none": ({"tests": [{"stdin": ""}]}, "test 0 is a dict"),
    "an unknown rule": ({"tests": [StdioTest(compare="fuzzy")]}, "compares by 'fuzzy'; it must be one of exact, trim"),  # type: ignore[arg-type]
    "an order that a rule cannot ignore": (
        {"tests": [StdioTest(compare="floats", any_order=True)]}, "'floats' in any order"
    ),
    "a negative tolerance": ({"tests": [StdioTest(tolerance=-1.0)]}, "tolerance -1.0"),
    "a tolerance that is no number": ({"tests": [StdioTest(rel_tolerance=float("nan"))]}, "rel_tolerance nan"),
    "no workers": ({"num_parallel": 0}, "num_parallel is 0"),
    "too many workers": ({"num_parallel": 1000}, "num_parallel is 1000"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_is_one_clear_error(pool: SandboxPool, name: str) -> None:
    change, words = BAD[name]
    request: dict[str, Any] = {"code": "print(1)", "tests": [RIGHT], **change}
    with pytest.raises(UserError) as raised:
        await pool.judge(**request)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400
    assert pool.stats.num_running == 0
    assert (await pool.judge("print(1)", [RIGHT])).has_passed
    assert not (await pool.judge("print(2)", [RIGHT])).has_passed


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "with open('/tmp/x', 'wb') as f:\n  while True: f.write(b'x' * (1 << 20))"),
        ("bash", "yes > /tmp/x"),
        ("bash", "cat /dev/zero > /work/x; cat /dev/zero > /dev/shm/x; cat /dev/zero > /tmp/x; exit 5"),
    ],
)
async def test_code_that_fills_its_disk_fails_alone(pool: SandboxPool, language: str, code: str) -> None:
    [result] = (await pool.judge(code, [StdioTest()], language=language)).tests
    assert result.verdict in (Verdict.ERROR, Verdict.KILLED, Verdict.TIMEOUT), result
    assert (await pool.judge("open('/tmp/x', 'w').write('x'); print(1)", [RIGHT])).has_passed


@pytest.mark.usefixtures("_needs_isolation")
async def test_a_full_disk_of_the_host_does_not_matter_to_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    monkeypatch.setattr(tempfile, "mkstemp", full)
    async with SandboxPool(SandboxConfig(warm=1)) as started:
        assert (await started.judge("echo 1", [RIGHT], language="bash")).has_passed


async def test_without_isolation_a_disk_that_takes_nothing_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(SandboxError, match=r"cannot make its directory in .*gone"):
        async with SandboxPool(SandboxConfig(backend="unsafe", warm=1)):
            pass


@pytest.mark.usefixtures("_needs_isolation")
async def test_a_host_without_descriptors_left_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> Callable[..., object]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with SandboxPool(SandboxConfig(warm=0)) as started:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socketpair", none_left)
            with pytest.raises(SandboxError, match=r"no socket could be made for the sandbox: .*Too many open files"):
                await started.judge("print(1)", [RIGHT])
        assert started.stats.num_running == 0
        assert (await started.judge("print(1)", [RIGHT])).has_passed


@pytest.mark.usefixtures("_needs_isolation")
@pytest.mark.parametrize(
    ("preload", "words"),
    [
        ("no_such_module", "no_such_module, which is not installed"),
        ("numpy.nothing", "numpy.nothing cannot be imported"),
    ],
)
async def test_a_module_that_cannot_be_preloaded_is_named(preload: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        async with SandboxPool(SandboxConfig(preload=(preload,))):
            pass


@pytest.mark.usefixtures("_needs_isolation")
async def test_a_preloaded_module_is_there_and_no_test_inherits_anothers_changes() -> None:
    code = (
        "import sys; assert 'numpy' in sys.modules\n"
        "import numpy as np; print(hasattr(np, 'mark'), np.arange(10).sum()); np.mark = 1\n"
        "print(np.random.rand(), file=sys.stderr)\n"
    )
    async with SandboxPool(SandboxConfig(warm=1, preload=("numpy", "numpy.random"))) as started:
        result = await started.judge(code, [StdioTest("", "False 45")] * 3)
        assert result.has_passed, result.tests
        assert len({test.stderr for test in result.tests}) == 3, "every test draws the same random numbers"
    async with SandboxPool(SandboxConfig(warm=1, python_packages=("numpy",))) as started:
        assert (await started.judge("import numpy; print(1)", [RIGHT])).has_passed
