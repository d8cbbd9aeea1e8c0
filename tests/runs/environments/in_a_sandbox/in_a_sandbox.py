"""An environment whose rollouts each have a command run in a sandbox, and note which service made that.

The folder METTLE_TEST_SEEN gets an empty file for the address of each service.
"""

import os
from pathlib import Path
from urllib.parse import quote

import mettle.envs as vf
from mettle.envs.sandboxes.shared import SharedMachines, shared_machines
from mettle.sandbox import MachineConfig


def ascii_share(completion: list[dict[str, str]]) -> float:
    """Share of characters that are ASCII; an empty answer scores 0."""
    text = completion[-1]["content"] or ""
    return sum(character.isascii() for character in text) / len(text) if text else 0.0


class InASandbox(vf.SingleTurnEnv):
    """Begins each rollout with a sandbox."""

    async def setup_state(self, state: vf.State, **kwargs: object) -> vf.State:
        home = shared_machines()
        await home.run(self._use(home))
        return await super().setup_state(state, **kwargs)

    async def _use(self, home: SharedMachines) -> None:
        machine = await home.create(MachineConfig(memory_mb=64, disk_mb=8))
        try:
            done = await machine.exec(["sh", "-c", "echo $((2 + 3))"])
            assert "5" in str(done.stdout)
            (Path(os.environ["METTLE_TEST_SEEN"]) / quote(machine.connection.url, safe="")).touch()
        finally:
            await machine.delete()


def load_environment(num_train: int = 2000, num_eval: int = 8) -> vf.Environment:
    """Words as questions; the answers do not matter."""
    rows = [{"question": f"say {number}", "answer": "abc"} for number in range(num_train + num_eval)]
    return InASandbox(dataset=rows[:num_train], eval_dataset=rows[num_train:], rubric=vf.Rubric(funcs=[ascii_share]))
