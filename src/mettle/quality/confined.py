"""What a machine runs to look at an environment that somebody else wrote: load it, and make its card.

    python -m mettle.quality.confined load NAME
    python -m mettle.quality.confined card NAME FILE

Code that an environment judges runs here without another sandbox: a machine cannot make one inside itself, and is what
keeps that code from the host. Invariant: it does nothing outside a machine.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Final

from mettle.errors import MettleError, UserError

MARK: Final = "METTLE_CONFINED"
"""Set by who made the machine. Without it nothing is run: elsewhere, judging without a sandbox would be the host's."""

MAX_TASKS: Final = 200
MAX_TASK_CHARS: Final = 2000


def main(words: list[str]) -> int:
    """Returns the exit code: 0 when the environment loads, or the card was written."""
    if os.environ.get(MARK) != "1":
        raise UserError("this program is for the inside of a machine; `mettle env check NAME` is for people")
    _judge_in_place()
    what, name, *rest = words
    if what == "load":
        from mettle.envs import load_environment

        env = load_environment(name)
        print(f"loads: {type(env).__name__}")
        return 0
    from mettle.quality.card import make_card

    card = make_card(name, on_step=lambda step: print(f"checking: {step}", flush=True))
    Path(rest[0]).write_text(json.dumps({**card.to_dict(), "tasks": _tasks(name)}), encoding="utf-8")
    return 0


def _tasks(name: str) -> list[str]:
    """What the first tasks ask, to find the environment by; nothing where that cannot be read."""
    from mettle.envs import load_environment
    from mettle.quality.rewards.layouts import prompt_text

    try:
        rows = load_environment(name).dataset.take(MAX_TASKS)
        return [prompt_text(row, roles=("user", "text"))[:MAX_TASK_CHARS] for row in rows]
    except Exception as error:  # the environment's own code, which may do anything; its card says what of it fails
        print(f"no tasks to find it by: {type(error).__name__}: {error}"[:300], flush=True)
        return []


def _judge_in_place() -> None:
    from mettle.sandbox import config

    config.SandboxConfig.model_fields["backend"].default = "unsafe"
    config.SandboxConfig.model_rebuild(force=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except MettleError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
