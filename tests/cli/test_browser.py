"""`mettle eval view` in a terminal, in a pipe, and without Textual."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import sys
import termios
import time
from pathlib import Path

import pytest

from mettle.cli import browser
from mettle.processes.readiness import is_readable

SOURCE = Path(browser.__file__).resolve().parents[2]


@pytest.fixture
def evaluation(tmp_path) -> Path:
    """One evaluation of one rollout, under the folder that commands run in."""
    folder = tmp_path / "outputs" / "evals" / "toy--m" / "run00001"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps({"env_id": "toy", "model": "m", "avg_reward": 1.0}))
    row = {
        "example_id": 0,
        "prompt": [],
        "completion": [{"role": "assistant", "content": "hello there"}],
        "reward": 1.0,
    }
    (folder / "results.jsonl").write_text(json.dumps(row) + "\n")
    return folder


@pytest.fixture
def opened(monkeypatch) -> list[tuple[Path | None, int | None]]:
    """A terminal in which the browser only notes what it was opened on."""
    app = pytest.importorskip("mettle.tui.app")
    seen: list[tuple[Path | None, int | None]] = []
    monkeypatch.setattr(app, "browse", lambda path, rollout=None: seen.append((path, rollout)))
    monkeypatch.setattr(browser, "is_terminal", lambda: True)
    return seen


def test_a_terminal_gets_the_browser_and_nothing_else(mettle, evaluation, opened):
    assert mettle("eval", "view").out == ""
    assert mettle("eval", "view", evaluation, "-i", "0").out == ""
    assert opened == [(None, None), (evaluation, 0)]


def test_plain_json_and_pipes_print(mettle, evaluation, opened, monkeypatch):
    assert "toy" in mettle("eval", "view", "--plain").out
    assert mettle("eval", "view", "--json").json[0]["env_id"] == "toy"
    monkeypatch.setattr(browser, "is_terminal", lambda: False)
    assert "hello there" in mettle("eval", "view", evaluation).out
    assert opened == []


def test_without_textual_one_line_says_how_to_have_it(mettle, evaluation, monkeypatch):
    monkeypatch.setattr(browser, "is_terminal", lambda: True)
    monkeypatch.setattr(browser, "find_spec", lambda name: None)
    shown = mettle("eval", "view", evaluation)
    assert (shown.code, shown.err.count("\n")) == (0, 1)
    assert "pip install 'mettle-lab[tui]'" in shown.err
    assert "hello there" in shown.out


def test_a_path_without_an_evaluation_is_one_line(mettle, monkeypatch):
    pytest.importorskip("textual")
    monkeypatch.setattr(browser, "is_terminal", lambda: True)
    ended = mettle("eval", "view", "nowhere")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "no evaluation in nowhere" in ended.err


@pytest.mark.e2e
def test_a_real_terminal_is_left_as_it_was_found(evaluation, tmp_path):
    """The program itself, on a terminal of ours: it draws, it answers q, it gives the screen back."""
    pytest.importorskip("textual")
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover - the child
        os.chdir(tmp_path)
        os.environ.update(TERM="xterm-256color", PYTHONPATH=str(SOURCE))
        os.execv(sys.executable, [sys.executable, "-m", "mettle.cli", "eval", "view", str(evaluation), "-i", "0"])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    drawn = _read_until(terminal, b"hello there")
    assert b"\x1b[?1049h" in drawn, "it has a screen of its own"
    os.write(terminal, b"q")
    left = _read_until(terminal, b"\x1b[?1049l")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
    assert b"Traceback" not in drawn + left


def _read_until(terminal: int, wanted: bytes, limit_s: float = 300.0) -> bytes:
    seen, end = b"", time.monotonic() + limit_s
    while wanted not in seen and time.monotonic() < end:
        if is_readable(terminal, 0.2):
            try:
                seen += os.read(terminal, 65536)
            except OSError:  # The other end is gone.
                break
    assert wanted in seen, seen[-2000:]
    return seen
