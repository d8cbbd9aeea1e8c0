"""Looking at an evaluation while it runs, and at one of ten thousand rollouts."""

from __future__ import annotations

import gc
import json
import os
import time

import pytest

from mettle.tui.screens.run import RunScreen


def add(path, *rows):
    with (path / "results.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


async def read_on(at) -> str:
    """What happens every second."""
    screen = next(screen for screen in at.app.screen_stack if isinstance(screen, RunScreen))
    screen.read_on()
    await at.settle()
    return at.text


async def test_new_rollouts_appear_and_the_cursor_stays(browse, write, make_row):
    path = write([make_row(1, 0.0), make_row(1, 1.0)], "live", num_examples=3)
    metadata = json.loads((path / "metadata.json").read_text())
    del metadata["stats"]
    (path / "metadata.json").write_text(json.dumps(metadata))
    async with browse(path) as at:
        assert "live, 2 of 6" in at.text.splitlines()[0]
        await at.press("s", "down")
        assert at.app.screen.index() == 1
        add(path, make_row(2, 0.5))
        assert "2 of 6" not in (await read_on(at)).splitlines()[0]
        assert "live, 3 of 6" in at.text
        assert "reward 0.500" in at.text
        assert (at.app.screen.index(), at.app.screen.table.cursor) == (1, 2)
        os.utime(path / "results.jsonl", (time.time() - 120,) * 2)
        assert "unfinished, 3 of 6, last 2 min ago" in (await read_on(at)).splitlines()[0]
        add(path, make_row(2, 1.0), make_row(3, 1.0), make_row(3, None))
        assert " of 6" not in (await read_on(at)).splitlines()[0]


async def test_following_stays_with_the_newest(browse, write, make_row):
    path = write([make_row(1, 0.0)], "followed")
    async with browse(path) as at:
        assert "following" in await at.press("F")
        add(path, make_row(2, 1.0), make_row(3, 1.0))
        assert "3 of 3" in await read_on(at)
        await at.press("F")
        add(path, make_row(4, 1.0))
        assert "3 of 4" in await read_on(at)


async def test_a_half_written_line_waits_for_its_rest(browse, write, make_row):
    path = write([make_row(1, 0.0)], "half")
    line = json.dumps(make_row(2, 1.0)) + "\n"
    async with browse(path) as at:
        for part, count in ((line[:40], 1), (line[40:], 2)):
            with (path / "results.jsonl").open("a") as file:
                file.write(part)
            assert f"1 of {count}" in await read_on(at)


async def test_filters_hold_for_what_comes(browse, write, make_row):
    path = write([make_row(1, 0.0)], "filtered")
    async with browse(path) as at:
        await at.press("f")
        await at.type('reward>0.4 text:"question 2"')
        assert at.app.screen.run.selection.order == []
        assert "no rollout is like that" in at.text
        add(path, make_row(2, 1.0), make_row(3, 1.0), make_row(2, 0.0))
        await read_on(at)
        assert at.app.screen.run.selection.order == [1]


async def test_a_file_that_is_written_anew_is_read_anew(browse, write, make_row):
    path = write([make_row(task, 0.0) for task in range(5)], "anew")
    async with browse(path) as at:
        await at.press("end")
        (path / "results.jsonl").write_text(json.dumps(make_row(9, 1.0)) + "\n")
        assert "1 of 1" in await read_on(at)
        assert at.text.splitlines()[3].split()[:3] == ["0", "9", "1.000"]


async def test_new_evaluations_appear_in_the_lists(browse, write, make_row):
    async with browse() as at:
        await at.press("enter")
        write([make_row(1, 1.0)], "other", model="another")
        at.app.screen.look()
        await at.settle()
        assert "2 models" in at.text
        assert at.line("another").split()[0] == "another"


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Ten thousand rollouts of five turns each."""
    folder = tmp_path_factory.mktemp("many") / "outputs" / "evals" / "big--m" / "many0001"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps({"env_id": "big", "model": "m", "rollouts_per_example": 4}))
    turn = [
        {"role": "assistant", "content": "word " * 60, "tool_calls": [json.dumps({"id": "c", "name": "f", "arguments": "{}"})]},
        {"role": "tool", "tool_call_id": "c", "content": "result " * 20},
    ]  # fmt: skip
    tail = json.dumps(
        {"prompt": [{"role": "user", "content": "question " * 20}], "completion": turn * 5, "metrics": {}}
    )[1:]
    with (folder / "results.jsonl").open("w") as file:
        for i in range(10_000):
            needle = '"answer": "needle", ' if i % 1000 == 999 else ""
            file.write(f'{{"example_id": {i // 4}, "reward": {i % 4 / 3:.3f}, {needle}{tail}\n')
    return folder


@pytest.fixture
def own_garbage():
    """What earlier tests of this process left is not walked by the collector while this one counts processor time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.nightly
async def test_ten_thousand_rollouts_open_within_a_second_of_work(browse, many, own_garbage):
    began = time.process_time()
    async with browse(many) as at:
        took = time.process_time() - began
        assert "1 of 10,000" in at.text
        assert took < 3.0, "a second on an idle machine of today, with room for a slow one"
        assert len(at.app.screen.query("*")) < 40, "rows are drawn, not made"
        began = time.process_time()
        for key in ("end", "home", "pagedown", "s", "s", "S"):
            await at.press(key)
        assert (time.process_time() - began) / 6 < 0.5
        assert "10,000" in at.text


@pytest.mark.nightly
async def test_a_search_through_ten_thousand_rollouts_ends_the_one_before_and_answers_keys_meanwhile(browse, many):
    async with browse(many) as at:
        screen = at.app.screen
        screen.search("word")
        screen.search("needle")
        await at.pilot.press("down", "down")
        assert screen.table.cursor >= 2 or screen.run.found, "a key is answered while it looks, or it was that quick"
        await at.settle()
        assert "'needle': 10 found" in at.text
        assert sorted(screen.run.found) == list(range(999, 10_000, 1000))
        screen.search("")
        await at.settle()
        assert "found" not in at.text
