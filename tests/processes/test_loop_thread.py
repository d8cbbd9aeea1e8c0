"""A loop in a thread: it carries work from any thread, and nothing is left of it when it is closed."""

import asyncio
import gc
import logging
import threading

import pytest

from mettle.processes.loop_thread import LoopThread


def test_work_runs_in_the_thread_and_its_result_or_error_comes_back():
    async def where() -> str:
        return threading.current_thread().name

    async def fails() -> None:
        raise ValueError("no")

    loop = LoopThread("beside")
    assert loop.submit(where()).result(60) == "beside"
    with pytest.raises(ValueError, match="no"):
        loop.submit(fails()).result(60)
    assert loop.close()
    assert not loop.is_alive


def test_what_still_runs_at_the_end_is_cancelled_and_tidies_up(caplog):
    said: list[str] = []
    has_begun = threading.Event()

    async def tidies() -> None:
        has_begun.set()
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0)  # tidying takes more than one round of the loop
            said.append("tidied")

    loop = LoopThread("beside")
    future = loop.submit(tidies())
    assert has_begun.wait(60)
    with caplog.at_level(logging.ERROR):
        assert loop.close()
        assert loop.close()
        gc.collect()  # asyncio says it of a pending task when that is collected
    assert said == ["tidied"]
    assert future.cancelled()
    assert "destroyed" not in caplog.text


def test_a_thread_that_does_not_end_in_time_is_said_to():
    has_begun, is_over = threading.Event(), threading.Event()

    async def blocks() -> None:
        has_begun.set()
        is_over.wait()

    loop = LoopThread("beside")
    loop.submit(blocks())
    assert has_begun.wait(60)
    assert not loop.close(0.01)
    is_over.set()
    assert loop.close()
