"""Memory that tensors gave back stays with the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource, torch
from mettle.inference.engine.allocator import keep_freed_memory

def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        kept = [torch.ones(2 << 20) for _ in range(3)]  # 8 MB each
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
faults(2)
before = faults(10)
keep_freed_memory()
faults(2)
print(before, faults(10))
"""


@pytest.mark.skipif("glibc" not in __import__("platform").libc_ver(), reason="only glibc is asked")
def test_tensors_get_pages_again_that_others_gave_back() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before > 10_000, "each round asks the kernel for its pages"
    assert after < before / 10
