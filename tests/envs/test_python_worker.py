"""The interpreter inside a sandbox: who may talk to it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mettle.envs import python_worker
from mettle.envs.python_env import PythonEnded, _read_answer


@pytest.fixture
def worker() -> Iterator[tuple[int, str]]:
    """Its port and its secret."""
    command = [sys.executable, "-u", "-c", Path(python_worker.__file__).read_text()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        _, port, secret = process.stdout.readline().split()
        yield int(port), secret
        process.kill()


def told(port: int, said: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(said)
        try:
            return connection.makefile("rb").readline()
        except ConnectionResetError:
            return b""


def test_only_who_knows_the_secret_has_code_run(worker: tuple[int, str], tmp_path: Path) -> None:
    port, secret = worker
    order = json.dumps({"code": f"open({str(tmp_path / 'mark')!r}, 'w').close()"}).encode() + b"\n"
    page = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain\r\n\r\n"
    for stranger in (order, page + order, b"0" * len(secret) + b"\n" + order, secret.encode()[:-1] + b"\n" + order):
        assert told(port, stranger) == b""
        assert not (tmp_path / "mark").exists()
    assert json.loads(told(port, secret.encode() + b"\n" + order))["status"] == "ok", "strangers have not ended it"
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", "[" * 100_000, '{"status": 1}']
    + [
        json.dumps({"status": "ok", "stdout": "", "stderr": "", "result": None, "execution_count": 1} | odd)
        for odd in (
            {"execution_count": float("inf")},
            {"execution_count": "1"},
            {"stdout": [["x"]]},
            {"result": {"a": 1}},
        )
    ],
    ids=range(9),
)
def test_whatever_the_code_answers_in_the_workers_place_is_told_as_its_end(line: str) -> None:
    """No exception that would count as the sandbox's failure, and take the rollout out of its group."""
    with pytest.raises(PythonEnded):
        _read_answer(line.encode())
