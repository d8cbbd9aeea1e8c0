"""The contract of sandbox backends, as test classes to subclass. Needs pytest and pytest-asyncio.

    class TestMine(MachineContract):
        @pytest_asyncio.fixture(scope="module", loop_scope="module")
        async def machines(self):
            async with open_machines(SandboxConfig(backend="mine")) as started:
                yield started

    class TestMyJudge(JudgeContract):     # likewise, with a fixture `judge`

All tests of a class share the pool of its fixture and one event loop per module. In `conftest.py`,
`pytest.register_assert_rewrite("mettle.sandbox.testing")` before the import makes failures explain themselves.

A machine needs `sh`, the usual small programs (`cat`, `seq`, `stat`, `find`, `mkfifo`, ...) and `python3`. A test that
a backend cannot pass is overridden in the subclass, where its reason can be read.
"""

from mettle.sandbox.testing.commands import CommandContract
from mettle.sandbox.testing.files import FileContract
from mettle.sandbox.testing.judge import JudgeContract
from mettle.sandbox.testing.lives import LifeContract
from mettle.sandbox.testing.ports import PortContract
from mettle.sandbox.testing.streams import StreamContract


class MachineContract(CommandContract, StreamContract, FileContract, PortContract, LifeContract):
    """Everything that machines keep. A subclass gives the fixture `machines`, a started pool."""


__all__ = [
    "CommandContract",
    "FileContract",
    "JudgeContract",
    "LifeContract",
    "MachineContract",
    "PortContract",
    "StreamContract",
]
