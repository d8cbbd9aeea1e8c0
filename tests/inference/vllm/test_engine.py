"""vLLM as a child: what it is refused with, how its death is told, and that it never outlives us. See `stand_in`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from mettle.clients.renderer import Renderer
from mettle.errors import MettleError, ServiceError, UserError
from mettle.inference.config import InferenceConfig, VllmSettings
from mettle.inference.engine.protocol import EngineLost, Generation, GenerationRequest, RequestRefused, WeightsRejected
from mettle.inference.launch import open_engine
from mettle.inference.vllm.engine import VllmEngine
from mettle.inference.vllm.launch import command, first_complaint
from mettle.inference.vllm.wire import VllmWire
from mettle.processes.child import import_path, process_state
from mettle.records.sampling import SamplingParams

WAIT_S = 100.0
PYTHONPATH = os.pathsep.join([str(Path(__file__).parent / "stand_in"), import_path()])


def config_of(model: Path, **changes: Any) -> InferenceConfig:
    settings = VllmSettings(python=Path(sys.executable), environment={"PYTHONPATH": PYTHONPATH})
    return InferenceConfig(model=model, **{"engine": "vllm", "vllm": settings, "max_slots": 4, **changes})


class Outcome:
    """A listener that waits for the end."""

    def __init__(self) -> None:
        self.found: Generation | MettleError | None = None
        self.has_begun, self.has_ended = threading.Event(), threading.Event()

    def on_token(self, event: Any) -> None:
        self.has_begun.set()

    def on_finish(self, generation: Generation) -> None:
        self.found = generation
        self.has_ended.set()

    def on_failure(self, error: MettleError) -> None:
        self.found = error
        self.has_ended.set()


@pytest.fixture
def deaths() -> list[MettleError]:
    return []


@pytest.fixture
def engine(policy_folder: Path, renderer: Renderer, tmp_path: Path, deaths: list[MettleError]) -> Iterator[VllmEngine]:
    made = open_engine(
        config_of(policy_folder), eos_token_ids=renderer.stop_token_ids, on_death=deaths.append, logs=tmp_path
    )
    assert isinstance(made, VllmEngine)
    yield made
    made.close()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_child_that_dies_is_the_engine_s_death_with_its_last_lines(
    engine: VllmEngine, deaths: list[MettleError], tmp_path: Path
) -> None:
    outcome = Outcome()
    params = SamplingParams(max_tokens=250, ignore_eos=True)
    engine.submit(GenerationRequest("r", (1, 2), params, has_token_events=True), outcome)
    assert outcome.has_begun.wait(WAIT_S)
    with (tmp_path / "vllm.out").open("a") as log:
        log.write("out of memory, said the child\n")
    os.kill(engine._server.pid, signal.SIGKILL)
    until(lambda: bool(deaths))
    assert "ended by SIGKILL" in str(deaths[0])
    assert "out of memory, said the child" in str(deaths[0])
    assert outcome.has_ended.wait(WAIT_S)
    assert isinstance(outcome.found, EngineLost | Generation)
    assert not engine.status().is_alive


def test_what_it_cannot_honour_is_refused_in_one_line(engine: VllmEngine, tmp_path: Path) -> None:
    with pytest.raises(RequestRefused, match="from -100 to 100"):
        engine.submit(GenerationRequest("r", (1,), SamplingParams(logit_bias=((1, 200.0),))), Outcome())
    with pytest.raises(RequestRefused, match="stop strings"):
        engine.submit(GenerationRequest("r", (1,), SamplingParams(stop=("x",))), Outcome())
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    with pytest.raises(WeightsRejected, match="lora_rank"):
        engine.load_adapter("mine", tmp_path)


async def test_an_error_in_a_stream_says_whose_it_is_in_one_line(tmp_path: Path) -> None:
    said = iter(["Grammar error:\n  unclosed group", "the engine is dead"])

    async def stream(_: web.Request) -> web.Response:
        error = {"message": next(said), "type": "BadRequestError", "code": 400 if told else 500}
        return web.Response(text=f"data: {json.dumps({'error': error})}\n\n", content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/inference/v1/generate", stream)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "http")).start()
    wire = VllmWire(tmp_path / "http")
    try:
        told = True
        with pytest.raises(RequestRefused, match=r"vLLM: Grammar error: unclosed group$"):
            await anext(wire.stream({}))
        told = False
        with pytest.raises(ServiceError, match="the engine is dead"):
            await anext(wire.stream({}))
    finally:
        await wire.close()
        await runner.cleanup()


def test_an_interpreter_that_is_not_there_is_the_user_s_mistake(policy_folder: Path, tmp_path: Path) -> None:
    wrong = config_of(policy_folder, vllm=VllmSettings(python=tmp_path / "python"))
    with pytest.raises(UserError, match="no such file"):
        open_engine(wrong)


def test_a_child_that_ends_at_once_says_why(policy_folder: Path) -> None:
    settings = VllmSettings(
        python=Path(sys.executable), args=("--no-such-flag",), environment={"PYTHONPATH": PYTHONPATH}
    )
    with pytest.raises(ServiceError, match="unrecognized arguments: --no-such-flag"):
        open_engine(config_of(policy_folder, vllm=settings))


def test_the_first_complaint_is_the_reason_and_not_how_others_heard_of_it(tmp_path: Path) -> None:
    log = tmp_path / "out"
    log.write_text(
        "ValueError: of a life before\n"
        "(VllmWorker-0 pid=8) ERROR 11-23 05:59:11 [executor.py:953] ValueError: Available memory is too little (0.92)\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert first_complaint(log, 29) == "ValueError: Available memory is too little (0.92)"
    assert first_complaint(log, log.stat().st_size) == ""
    assert first_complaint(tmp_path / "none", 0) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vllm": None}, "go together"),
        ({"engine": "embedded"}, "go together"),
        ({"max_prefill_tokens": 100}, "max_prefill_tokens is the embedded engine's"),
        ({"engine": "remote", "vllm": None}, "go together"),
        ({"engine": "remote", "vllm": None, "remote": {"urls": ["127.0.0.1"]}}, "no address"),
        ({"engine": "remote", "vllm": None, "replicas": 2, "remote": {"urls": ["http://h/v1"]}}, "replicas is for"),
    ],
)
def test_settings_that_do_not_go_together_are_told_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        config_of(tmp_path, **changes)


@pytest.mark.e2e
def test_it_does_not_outlive_a_server_that_is_killed(policy_folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "inference.json"
    config.write_text(config_of(policy_folder).model_dump_json())
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "mettle.inference", "--config", str(config), "--ready-file", str(ready)]
    server = subprocess.Popen(command)
    try:
        until(lambda: ready.exists() or server.poll() is not None)
        children = Path(f"/proc/{server.pid}/task").glob("*/children")
        pids = [int(pid) for path in children for pid in path.read_text().split()]
        assert pids
    finally:
        server.kill()
        server.wait()
    until(lambda: not any(process_state(pid) for pid in pids))


def test_room_for_adapters_is_asked_for_in_the_sizes_that_vllm_has(tmp_path: Path) -> None:
    settings = VllmSettings(python=tmp_path, lora_rank=12, lora_modules=("q_proj",), args=("--max-loras", "9"))
    made = command(
        config_of(tmp_path, vllm=settings, max_adapters=2, max_adapter_versions=3, kv_cache_bytes=10**9), tmp_path, 64
    )
    assert made[made.index("--kv-cache-memory-bytes") + 1] == "1000000000"
    lora = made[made.index("--enable-lora") :]
    assert lora == [
        *("--enable-lora", "--max-lora-rank", "16", "--max-loras", "4", "--max-cpu-loras", "10"),
        *("--lora-target-modules", "q_proj", "--max-loras", "9"),
    ]
    assert "--enable-lora" not in command(config_of(tmp_path), tmp_path, 64)
