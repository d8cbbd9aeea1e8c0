"""The Python of a `PythonEnv`, as a program that is run inside a sandbox: it keeps its variables between requests.

It is sent into the sandbox as source and never imported by the rest of the package; standard library only. It prints
its process id, the port it listens on and a secret; whoever connects sends the secret as its first line. Then each
request is a line of JSON with `code`, each answer a line with `status`, `stdout`, `stderr`, `result` and
`execution_count`.
Invariants: a request that fails or is interrupted is answered, and what was defined before stays defined; who does not
know the secret is hung up on, and nothing of it is run.
"""

import ast
import contextlib
import hmac
import json
import linecache
import os
import secrets
import signal
import socket
import sys
import tempfile
import traceback
import types
from typing import Any

MAX_BYTES = 200_000
SECRET_WAIT_S = 5.0


def shortened(data: bytes) -> str:
    """Long output without its middle."""
    if len(data) > MAX_BYTES:
        half = MAX_BYTES // 2
        gap = f"\n[... {len(data) - 2 * half} bytes left out ...]\n".encode()
        data = data[:half] + gap + data[-half:]
    return data.decode(errors="replace")


class Capture:
    """What is written to a descriptor meanwhile, also by programs that the code starts."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (closed by `text`)
        self._saved = os.dup(descriptor)
        os.dup2(self._file.fileno(), descriptor)

    def text(self) -> str:
        """Everything so far, and the descriptor as it was."""
        os.dup2(self._saved, self._descriptor)
        os.close(self._saved)
        with self._file:
            self._file.seek(0)
            return shortened(self._file.read())


def run(code: str, namespace: dict[str, Any], name: str) -> str | None:
    """Run the code; the repr of its last line if that is an expression with a value."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if not isinstance(last, ast.Expr):
        return None
    value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    return None if value is None else repr(value)


def trace_of(error: BaseException, name: str) -> str:
    """The traceback from the code's own first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != name:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def flush() -> None:
    """Whatever the code has made of its streams."""
    for stream in {sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__}:
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]


def answer(code: str, namespace: dict[str, Any], number: int) -> dict[str, Any]:
    """Run one request with its output captured."""
    captures = Capture(1), Capture(2)
    name = f"<input {number}>"
    status, result = "ok", None
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        result = run(code, namespace, name)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except SystemExit as error:
        status, result = "error", f"SystemExit: {error.code}"
    except BaseException as error:
        status, result = "error", trace_of(error, name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt that comes when the code has ended is for nobody
    flush()
    stdout, stderr = (capture.text() for capture in captures)
    result = result and shortened(result.encode(errors="replace"))
    return {"status": status, "stdout": stdout, "stderr": stderr, "result": result, "execution_count": number}


def admit(connection: socket.socket, secret: bytes) -> bool:
    """Whether the secret came first, and in time. Where a machine shares its host's loopback, anybody can connect."""
    connection.settimeout(SECRET_WAIT_S)
    given = b""
    with contextlib.suppress(OSError):
        while len(given) <= len(secret) and not given.endswith(b"\n"):
            piece = connection.recv(len(secret) + 1 - len(given))
            if not piece:
                break
            given += piece
    connection.settimeout(None)
    return hmac.compare_digest(given, secret + b"\n")


def main() -> None:
    """Serve one connection after another, for ever."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = socket.create_server(("127.0.0.1", 0))
    secret = secrets.token_hex(16)
    print(os.getpid(), server.getsockname()[1], secret, flush=True)
    number = 0
    while True:
        connection, _ = server.accept()
        if not admit(connection, secret.encode()):
            connection.close()
            continue
        stream = connection.makefile("rwb")
        while line := stream.readline():
            number += 1
            answered = answer(json.loads(line)["code"], module.__dict__, number)
            stream.write(json.dumps(answered).encode() + b"\n")
            stream.flush()


if __name__ == "__main__":
    main()
