"""Every cell is a fork of the template, and pays for what the template has loaded."""

from __future__ import annotations

from mettle.sandbox import SandboxPool, StdioTest

# Compressors and `tarfile` are for machines; `random` would draw a state of its own in every fork.
NOT_FOR_CELLS = ("bz2", "lzma", "random", "shutil", "tarfile", "zlib")
LOADED = f"import sys\nprint(*[name for name in {NOT_FOR_CELLS!r} if name in sys.modules])\n"


async def test_a_cell_carries_no_library_that_only_machines_use(pool: SandboxPool) -> None:
    result = await pool.judge(LOADED, [StdioTest("", "")])
    assert result.has_passed, result.tests[0].output


async def test_code_can_import_what_the_template_leaves_out(pool: SandboxPool) -> None:
    source = f"import {', '.join(NOT_FOR_CELLS)}\nprint(zlib.decompress(zlib.compress(b'kept')).decode())\n"
    result = await pool.judge(source, [StdioTest("", "kept")])
    assert result.has_passed, result.tests[0].detail
