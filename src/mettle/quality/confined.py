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
    Path(rest[0]).write_text(json.dumps(card.to_dict()), encoding="utf-8")
    return 0


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
