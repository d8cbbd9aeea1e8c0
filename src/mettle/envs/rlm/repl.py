"""Where the model's code runs, and how its answer is read: a Python that stays, or a shell whose variables stay.

Parts: `GUEST_FOLDER`, `guest_files`, `python_prelude`, `python_answer`, `READ_ANSWER`; `BASH`, `bash_command`. In
Python the answer is the dict `answer` (`content`, `ready`); in the shell it is RLM_CONTENT, final with RLM_READY=1.
Invariant: whatever the code does to these names, reading them gives a text and a truth value, or nothing.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

GUEST_FOLDER: Final = "/tmp/.rlm"
BASH: Final = r"""
D=$1
[ -f "$D/vars" ] && . "$D/vars"
cd "$(cat "$D/cwd" 2>/dev/null || pwd)" || true
export PATH="$D/bin:$PATH"
_rlm_keep() {
    export RLM_CONTENT RLM_READY
    export -p > "$D/vars"
    pwd > "$D/cwd"
    printf %s "$RLM_READY" > "$D/ready"
    printf %s "$RLM_CONTENT" > "$D/content"
}
trap _rlm_keep EXIT
eval "$2"
"""
READ_ANSWER: Final = (
    "__import__('json').dumps([bool(answer.get('ready')), str(answer.get('content', ''))])"
    " if isinstance(globals().get('answer'), dict) else None"
)


class CodeAnswer(NamedTuple):
    """What the code has made of its answer so far."""

    is_ready: bool
    content: str


def guest_files(port: int, secret: str, commands: Iterable[str]) -> dict[str, bytes]:
    """The bridge's other end, and a command of the shell for each function."""
    source = Path(__file__).with_name("guest.py").read_bytes()
    files = {
        f"{GUEST_FOLDER}/guest.py": source,
        f"{GUEST_FOLDER}/bridge.json": json.dumps({"port": port, "secret": secret}).encode(),
    }
    for name in commands:
        script = f'#!/bin/sh\nexec python3 {GUEST_FOLDER}/guest.py {name} "$@"\n'
        files[f"{GUEST_FOLDER}/bin/{name}"] = script.encode()
    return files


def python_prelude(functions: Iterable[str]) -> str:
    """What is defined before the model's first code, and again after its Python has ended."""
    lines = [
        "import importlib.util as _util",
        f"_spec = _util.spec_from_file_location('_rlm_guest', '{GUEST_FOLDER}/guest.py')",
        "_guest = _util.module_from_spec(_spec); _spec.loader.exec_module(_guest)",
        *(f"{name} = _guest.tool({name!r})" for name in functions),
        "answer = {'content': '', 'ready': False}",
        "del _util, _spec, _guest",
    ]
    return "\n".join(lines)


def python_answer(result: str | None) -> CodeAnswer | None:
    """The answer out of what `READ_ANSWER` evaluates to; None where the code has taken the name for something else."""
    try:
        ready, content = json.loads(ast.literal_eval(result or "None") or "null")
        return CodeAnswer(bool(ready), str(content))
    except (ValueError, TypeError, SyntaxError):
        return None


def bash_command(code: str) -> list[str]:
    """One step of the shell."""
    return ["bash", "-c", BASH, "repl", GUEST_FOLDER, code]
