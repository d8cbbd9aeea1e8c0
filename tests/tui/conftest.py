"""Saved evaluations to browse, and a browser to press keys in."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

os.environ["TEXTUAL_ANIMATIONS"] = "none"  # a tenth of the time goes into scrolling smoothly; read on import
from textual.pilot import Pilot
from textual.widgets import Input
from textual.worker import WorkerCancelled

from mettle.tui.app import EvaluationBrowser

ABOUT = {
    "env_id": "toy", "model": "m", "base_url": "http://127.0.0.1:1/v1", "num_examples": 2, "rollouts_per_example": 2,
    "pass_threshold": 0.5, "avg_reward": 0.5, "avg_error": 0.25, "time": 4.0, "sampling_args": {"temperature": 0.7},
    "env_args": {"length": 3}, "cost": {"total_usd": 0.02}, "stats": {}, "version_info": {"env_version": "0.1.0"},
}  # fmt: skip


def row_of(task: int, reward: float | None, **fields: Any) -> dict[str, Any]:
    """A row of the published format: a question, a thought, a tool call, its result, an answer."""
    call = {"id": "call_1", "name": "lookup", "arguments": json.dumps({"word": f"w{task}"})}
    failed = {
        "error": "ModelError",
        "message": "status 500",
        "kind": "provider",
        "error_chain_str": "ModelError -> TimeoutError",
    }
    return {
        "example_id": task,
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"question {task}"}],
        "completion": [
            {"role": "assistant", "content": "", "reasoning_content": f"I should look up w{task}", "tool_calls": [json.dumps(call)]},
            {"role": "tool", "tool_call_id": "call_1", "content": f"w{task} means {task}"},
            {"role": "assistant", "content": f"The **answer** is <answer>{task}</answer>"},
        ],
        "answer": str(task),
        "info": {"source": "a book"},
        "reward": reward,
        "error": failed if reward is None else None,
        "timing": {"total": 2.0 + task, "model": {"duration": 1.5}, "scoring": {"duration": 0.5}},
        "is_completed": True,
        "is_truncated": False,
        "stop_condition": "max_turns_reached" if task % 2 else "answered",
        "metrics": {"right": reward} if reward is not None else {},
        "token_usage": {"input_tokens": 10.0, "output_tokens": 30.0 + task} if reward is not None else None,
        "task_key": f"key{task}",
        **fields,
    }  # fmt: skip


def write_run(root: Path, rows: Iterable[dict[str, Any]], name: str = "run00001", /, **about: Any) -> Path:
    """Save an evaluation."""
    metadata = {**ABOUT, **about}
    folder = root / "outputs" / "evals" / "toy--m" / name
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps(metadata))
    with (folder / "results.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


SMALL = ((1, 1.0), (2, 0.0), (1, 0.25), (2, None))


Row = Callable[..., dict[str, Any]]
Write = Callable[..., Path]


@pytest.fixture
def make_row() -> Row:
    """Make a row: `make_row(task, reward, **fields)`."""
    return row_of


@pytest.fixture
def write(root: Path) -> Write:
    """Save another evaluation: `write(rows, name, **about)`."""
    return lambda rows, name, /, **about: write_run(root, rows, name, **about)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one evaluation of four rollouts of two tasks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLORFGBG", raising=False)
    write_run(tmp_path, [row_of(task, reward) for task, reward in SMALL])
    return tmp_path


@dataclass
class Browsing:
    """A browser that runs without a terminal."""

    app: EvaluationBrowser
    pilot: Pilot[None]
    sent: list[str]

    async def press(self, *keys: str) -> str:
        """Press keys one after the other, each when the last one has had its effect; the screen."""
        for key in keys:
            await self.pilot.press(key)
            await self.settle()
        return self.text

    async def type(self, text: str) -> str:
        """Type into the line that is open, and send it off; the screen."""
        prompt = self.app.screen.query_one(Input)
        assert prompt.has_focus, "a line is open"
        prompt.value = text
        return await self.press("enter")

    async def settle(self) -> None:
        """Wait until nothing is being read and everything is drawn: two looks in a row show the same."""
        await self.pilot.pause()
        while any(not worker.is_finished for worker in self.app.workers):
            with suppress(WorkerCancelled):  # by one that reads newer things in its place
                await self.app.workers.wait_for_complete()
            await self.pilot.pause()
        seen = ""
        while seen != self.text:
            seen = self.text
            await self.pilot.pause(0.01)

    @property
    def text(self) -> str:
        """What is seen."""
        strips = self.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)

    def line(self, part: str) -> str:
        """The line that holds this."""
        return next((line for line in self.text.splitlines() if part in line), "")


Browse = Callable[..., Any]


@pytest.fixture
def browse(root: Path) -> Browse:
    """Open a browser: `async with browse(size=(100, 30)) as at:`."""

    @asynccontextmanager
    async def opened(
        path: Path | None = None, size: tuple[int, int] = (120, 40), rollout: int | None = None
    ) -> AsyncIterator[Browsing]:
        app = EvaluationBrowser(root, path, rollout)
        sent: list[str] = []
        app.copy_to_clipboard = sent.append  # type: ignore[method-assign]
        async with app.run_test(size=size, notifications=True) as pilot:
            at = Browsing(app, pilot, sent)
            await at.settle()
            yield at

    return opened


@pytest.fixture
def run_path(root: Path) -> Path:
    """The evaluation of `root`."""
    return root / "outputs" / "evals" / "toy--m" / "run00001"
