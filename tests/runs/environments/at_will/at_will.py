"""An environment that does what a file in METTLE_TEST_FAULTS says: keep the event loop, or never answer."""

import asyncio
import os
import time
from pathlib import Path

import mettle.envs as vf

FOLDER = Path(os.environ.get("METTLE_TEST_FAULTS", "/nonexistent"))


async def ascii_share(completion: list[dict[str, str]]) -> float:
    """Share of characters that are ASCII, once nothing is wrong any more."""
    while (FOLDER / "holds-loop").exists():
        time.sleep(0.05)  # noqa: ASYNC251 - the very fault
    while (FOLDER / "never-answers").exists():  # noqa: ASYNC110 - the very fault
        await asyncio.sleep(0.05)
    text = completion[-1]["content"] or ""
    return sum(character.isascii() for character in text) / len(text) if text else 0.0


def load_environment(num_train: int = 2000, num_eval: int = 8) -> vf.Environment:
    """Words as questions; the answers do not matter."""
    while (FOLDER / "never-loads").exists():
        time.sleep(0.05)
    rows = [{"question": f"say {number}", "answer": "abc"} for number in range(num_train + num_eval)]
    return vf.SingleTurnEnv(
        dataset=rows[:num_train], eval_dataset=rows[num_train:], rubric=vf.Rubric(funcs=[ascii_share])
    )
