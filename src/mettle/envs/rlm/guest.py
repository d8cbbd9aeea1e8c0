"""The end of a bridge that lies in the sandbox: functions of the environment, called from the model's own code.

It is sent into the sandbox as a file beside `bridge.json` (port and secret) and never imported by the rest of the
package; standard library only. In Python, `tool(name)` is a function; in a shell, `guest.py NAME ARG...` is a command,
with `--json '{...}'` for arguments that are no text. Invariant: what a call raises says what the environment said.
"""

import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any


def call(name: str, args: Sequence[Any], kwargs: dict[str, Any], is_text: bool = False) -> Any:
    """The environment's answer to one call."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "bridge.json"), encoding="utf-8") as file:
        where = json.load(file)
    request = {"secret": where["secret"], "name": name, "args": list(args), "kwargs": kwargs, "is_text": is_text}
    with socket.create_connection(("127.0.0.1", where["port"])) as connection, connection.makefile("rwb") as stream:
        stream.write(json.dumps(request, default=str).encode() + b"\n")
        stream.flush()
        line = stream.readline()
    if not line:
        raise RuntimeError(f"{name}: the environment does not answer")
    answer = json.loads(line)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["result"]


def tool(name: str) -> Callable[..., Any]:
    """A function that calls the environment's function of that name."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return call(name, args, kwargs)

    called.__name__ = called.__qualname__ = name
    return called


def main(name: str, given: list[str]) -> int:
    """The same as a command: its answer on standard output, what went wrong on standard error."""
    try:
        if given[:1] == ["--json"]:
            value = json.loads(given[1])
            args, kwargs = ([], value) if isinstance(value, dict) else (value, {})
            answer = call(name, args, kwargs)
        else:
            if not given and not sys.stdin.isatty() and (piped := sys.stdin.read()):
                given = [piped]
            answer = call(name, given, {}, is_text=True)
    except (RuntimeError, OSError, ValueError, IndexError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    print(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2:]))
