"""A backend whose extra is not installed says in one line what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
sys.modules[sys.argv[2]] = None
from mettle.errors import UserError
from mettle.sandbox import SandboxConfig, open_judge, open_machines
for made in (open_machines, open_judge):
    try:
        made(SandboxConfig(backend=sys.argv[1]))
    except UserError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("backend", "missing"), [("docker", "aiodocker"), ("kubernetes", "kubernetes_asyncio"), ("kubernetes", "yaml")]
)
def test_a_missing_extra_is_named(backend: str, missing: str) -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT, backend, missing], capture_output=True, text=True, check=True)
    line = f"the backend {backend} needs {missing}: pip install 'mettle-lab[{backend}]'\n"
    assert ran.stdout == 2 * line
