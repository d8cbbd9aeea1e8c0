"""Processes of models: begun once, kept while they are asked, ended when nobody asks, told apart from what is broken."""

import asyncio
import os

import pytest

from mettle.hub.serving.models import HubModel
from mettle.processes.child import process_state
from mettle.web.problems import HttpError


def model(name):
    return HubModel(name, title=name)


async def test_many_who_ask_at_once_have_one_process(engines_of, tmp_path):
    async with engines_of(tmp_path) as engines:

        async def pid_of():
            async with engines.using(model("a")) as engine:
                return engine.process.pid

        pids = await asyncio.gather(*(pid_of() for _ in range(5)))
        assert len(set(pids)) == 1
        assert engines.names == ["a"]
    assert not process_state(pids[0])
    assert list(tmp_path.iterdir()) == []


async def test_one_that_is_asked_is_never_ended_for_another(engines_of, tmp_path):
    async with engines_of(tmp_path) as engines:
        async with engines.using(model("a")) as engine:
            with pytest.raises(HttpError, match="busy serving a") as refused:
                async with engines.using(model("b")):
                    pass
            assert refused.value.status == 503
            assert engine.is_alive
        async with engines.using(model("b")):
            assert engines.names == ["b"]
            await asyncio.to_thread(engine.process.wait)


async def test_one_that_nobody_asks_for_a_while_is_ended(engines_of, clock, tmp_path):
    async with engines_of(tmp_path) as engines:
        async with engines.using(model("a")) as engine:
            clock.now += 1000
            assert engines.sweep() == [], "an answer may take long"
        assert engines.sweep() == []
        clock.now += 61
        assert engines.sweep() == [engine]
        engines._end([engine])
        assert engines.names == []


async def test_one_that_does_not_start_says_why_and_is_tried_anew(engines_of, tmp_path):
    async with engines_of(tmp_path) as engines:
        for _ in range(2):
            with pytest.raises(HttpError, match="this model has no tokenizer"):
                async with engines.using(model("broken")):
                    pass


async def test_one_that_dies_is_begun_again(engines_of, tmp_path):
    async with engines_of(tmp_path) as engines:
        async with engines.using(model("a")) as engine:
            os.kill(engine.process.pid, 9)
            await asyncio.to_thread(engine.process.wait)
        async with engines.using(model("a")) as again:
            assert again is not engine
            assert again.is_alive


async def test_what_a_killed_server_has_left_is_removed(engines_of, tmp_path):
    (tmp_path / "999999999-ab").mkdir()
    (tmp_path / f"{os.getpid()}-cd").mkdir()
    async with engines_of(tmp_path):
        assert [each.name for each in tmp_path.iterdir()] == [f"{os.getpid()}-cd"]
