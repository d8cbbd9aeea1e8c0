"""What a person does: from all evaluations to one message, and back."""

from __future__ import annotations

import json
import os

import pytest


async def test_from_all_evaluations_to_one_rollout_and_back(browse):
    async with browse() as at:
        assert "mettle \u203a evaluations" in at.text
        assert at.line("toy").split()[:4] == ["toy", "1", "1", "0.500"]
        assert "mettle \u203a toy" in await at.press("enter")
        assert at.line("0.500").split()[:4] == ["m", "1", "0.500", "0.500"]
        assert "mettle \u203a toy \u203a m" in await at.press("enter")
        assert at.line("run00001  ").split()[1:5] == ["0.500", "4", "25%", "$0.02"]
        assert "reward 0.312" in await at.press("enter")
        assert "mettle \u203a toy \u203a m \u203a run00001 \u203a rollout 0" in await at.press("enter")
        for part in ("Be brief.", "question 1", "calls lookup", "word: w1", "result of lookup", "w1 means 1"):
            assert part in at.text
        for place in ("run00001", "m", "toy", "evaluations"):
            await at.press("escape")
            assert at.text.splitlines()[0].endswith(f"\u203a {place}")
        await at.press("escape")
        assert at.app._exit


async def test_a_run_shows_its_figures_and_its_rollouts(browse, run_path):
    async with browse(run_path, (140, 60)) as at:
        assert at.line("1 error ").split()[:2] == ["reward", "0.312"]
        for part in (
            "pass@1",
            "pass@2",
            "pass^2",
            "Metrics",
            "right",
            "Errors",
            "provider",
            "Stopped by",
            "temperature",
        ):
            assert part in at.text
        assert at.line("ModelError").split()[:4] == ["3", "2", "error", "2"]
        assert "1 of 4" in at.text


async def test_rollouts_are_sorted_by_key_and_by_mouse_and_the_cursor_stays_with_its_rollout(browse, run_path):
    async with browse(run_path) as at:
        screen = at.app.screen
        await at.press("j", "j")  # rollout 2, reward 0.25
        await at.press("s")
        assert screen.run.selection.order == [1, 2, 0, 3], "the one that failed has no reward and stands last"
        assert (screen.index(), screen.table.cursor) == (2, 1)
        await at.press("S")
        assert screen.run.selection.order == [0, 2, 1, 3]
        x = at.line("reward \u2193").index("tokens")
        await at.pilot.click("#main", offset=(x, 0))
        await at.settle()
        assert screen.run.selection.order == [1, 0, 2, 3], "most tokens first"
        assert "tokens \u2193" in at.text


async def test_a_filter_shows_what_was_asked_for_and_refuses_what_it_does_not_understand(browse, run_path):
    async with browse(run_path) as at:
        await at.press("f")
        assert "rewrad" in await at.type("rewrad<1")
        assert "did you mean 'reward'?" in at.text
        assert "1 of 2 | filter reward<0.5 (4 in all)" in await at.type("reward<0.5")
        await at.press("f")
        await at.type('text:"W2 MEANS" ok')
        assert at.app.screen.run.selection.order == [1]
        await at.press("e")
        assert at.app.screen.run.selection.order == [3]
        assert "4 of 4" in await at.press("e"), "the cursor stays with its rollout"


async def test_a_search_marks_rollouts_and_goes_from_one_to_the_next(browse, run_path):
    async with browse(run_path) as at:
        await at.press("slash")
        assert "'means 2': 2 found" in await at.type("means 2")
        assert at.app.screen.index() == 1
        assert [line.split()[1] for line in at.text.splitlines() if line.startswith(" \u2022")] == ["1", "3"]
        await at.press("n")
        assert at.app.screen.index() == 3
        await at.press("n")
        assert at.app.screen.index() == 1, "it goes round"
        await at.press("N", "enter")
        assert "'means 2': 1 of 1 places" in at.text
        await at.press("n")
        assert "rollout 1" in at.text.splitlines()[0], "after the last place comes the next rollout"


async def test_a_search_inside_a_rollout_goes_from_place_to_place_and_opens_reasoning(browse, run_path):
    async with browse(run_path, rollout=0) as at:
        assert "I should look up w1" not in [line.strip("\u258f\u258c ") for line in at.text.splitlines()]
        await at.press("slash")
        assert "'w1': 1 of 3 places" in await at.type("w1")
        thought = at.app.screen.transcript.blocks[2]
        assert (thought.kind, thought.is_open) == ("reasoning", True)
        assert "2 of 3" in await at.press("n")
        assert "1 of 3" in await at.press("N")
        assert "3 of 3" in await at.press("N")
        await at.press("escape")
        assert "places" not in at.text
        assert "rollout 0" in at.text.splitlines()[0], "the first escape ends the search"


async def test_the_next_rollout_is_the_next_of_the_list(browse, run_path):
    async with browse(run_path) as at:
        await at.press("s", "S", "home", "enter")
        seen = [at.app.screen.index]
        for _ in range(4):
            await at.press("right")
            seen.append(at.app.screen.index)
        assert seen == [0, 2, 1, 3, 3]
        await at.press("left", "escape")
        assert at.app.screen.index() == 1, "the list stands where the reader was"


@pytest.mark.nightly
async def test_markdown_json_wrap_and_info_are_turned_on_and_off(browse, run_path):
    async with browse(run_path, rollout=0) as at:
        assert "The answer is <answer>1</answer>" in at.text
        assert "The **answer** is" in await at.press("m")
        assert '"task_key": "key1"' in await at.press("r", "end")
        assert '"task_key"' not in await at.press("r")
        assert "not wrapped" in await at.press("w")
        assert "stopped by" in at.text
        assert "stopped by" not in await at.press("i")


@pytest.mark.nightly
async def test_reasoning_is_folded_until_it_is_asked_for(browse, run_path):
    async with browse(run_path, rollout=0) as at:
        folded = at.line("reasoning")
        assert "19 characters" in folded
        assert "characters" not in (await at.press("z"), at.line("reasoning"))[1]
        assert "I should look up w1" in at.text
        y = next(n for n, line in enumerate(at.text.splitlines()) if "\u258f reasoning" in line)
        await at.pilot.click("#main", offset=(4, y - 2))
        await at.settle()
        assert "19 characters" in at.line("reasoning"), "a click on the head folds it"


@pytest.mark.nightly
async def test_copying_gives_what_was_saved(browse, run_path):
    async with browse(run_path, rollout=0) as at:
        await at.press("right_square_bracket", "y", "c", "Y")
        message, row, conversation = at.sent
        assert message == "question 1"
        assert json.loads(row)["task_key"] == "key1"
        assert "## calls lookup\n\nword: w1" in conversation
        assert "copied the conversation" in at.text


@pytest.mark.nightly
async def test_a_text_too_long_for_a_clipboard_is_written_to_a_file(browse, write, make_row, root):
    long = write([make_row(0, 1.0, completion=[{"role": "assistant", "content": "x\ud83d" * 600_000}])], "long")
    async with browse(long, rollout=0) as at:
        await at.press("right_square_bracket", "right_square_bracket", "y")
        assert at.sent == []
        assert (root / "long-rollout-0.txt").stat().st_size == 1_200_000


async def test_the_rollouts_of_a_task_stand_side_by_side(browse, run_path):
    async with browse(run_path) as at:
        await at.press("t")
        assert at.text.splitlines()[0].endswith("task 1")
        assert "question 1" in at.text
        assert [line.split()[:2] for line in at.text.splitlines() if "answered" in line or "max_turns" in line][:2] == [
            ["0", "1.000"],
            ["2", "0.250"],
        ]
        assert "mean 0.625, 1 passed | spread 0.750" in at.text
        assert at.text.splitlines()[0].endswith("task 2") or "task 2" in await at.press("right")
        await at.press("down", "enter")
        assert "rollout 3" in at.text.splitlines()[0]
        assert "ModelError -> TimeoutError" in at.text


async def test_two_runs_are_compared(browse, write, make_row, root):
    better = write([make_row(task, reward) for task, reward in ((1, 1.0), (2, 1.0), (1, 1.0), (2, 1.0))], "run00002")
    os.utime(better / "metadata.json", (1, 1))
    async with browse(size=(130, 40)) as at:
        await at.press("enter", "enter")
        assert "mark two runs with x first" in await at.press("c")
        await at.press("x", "down", "x")
        assert [line.split()[:2] for line in at.text.splitlines()[2:4]] == [
            ["A", "run00001"],
            ["B", "run00002"],
        ]
        assert "B - A  +0.688" in await at.press("c")
        assert "2 rose, 0 fell" in at.text
        assert at.line("+1.000").split()[:4] == ["2", "0.000", "1.000", "+1.000"]
        await at.press("end", "enter")
        assert at.text.splitlines()[0].endswith("run00002 \u203a task 2")


@pytest.mark.nightly
async def test_runs_that_share_no_task_say_so(browse, write, make_row):
    write([make_row(7, 1.0)], "run00002")
    async with browse() as at:
        await at.press("enter", "enter", "x", "down", "x", "c")
        assert "no scored task in common" in " ".join(at.text.split())


async def test_help_explains_the_keys_of_the_screen_and_the_filters(browse, run_path):
    async with browse(run_path, (100, 60)) as at:
        shown = await at.press("question_mark")
        for part in ("esc  backspace  b", "Filter", "Next match", "Task", 'text:"so the"', "pgdn"):
            assert part in shown
        assert "Filters" not in await at.press("escape")


@pytest.mark.nightly
async def test_names_are_found_in_long_lists(browse, write, make_row):
    for name in ("zebra", "yak"):
        write([make_row(1, 1.0)], f"{name}01", env_id=name)
    async with browse() as at:
        assert "3 environments, 3 evaluations" in at.text
        await at.press("slash")
        assert "1 of 3" in await at.type("ZEB")
        assert "yak" not in at.text
        await at.press("enter")
        assert at.text.splitlines()[0].endswith("\u203a zebra")


@pytest.mark.nightly
async def test_light_and_dark_are_one_key_apart(browse, run_path, monkeypatch):
    async with browse(run_path, rollout=0) as at:
        dark = at.app.theme
        await at.press("ctrl+t")
        assert (dark, at.app.theme) == ("mettle-dark", "mettle-light")
    monkeypatch.setenv("COLORFGBG", "0;15")
    async with browse(run_path) as at:
        assert at.app.theme == "mettle-light"


@pytest.mark.parametrize("width", [60, pytest.param(80, marks=pytest.mark.nightly)])
async def test_a_narrow_terminal_shows_one_pane_at_a_time(browse, run_path, width):
    async with browse(run_path, (width, 24)) as at:
        assert "pass@1" not in at.text
        assert "0.250" in at.text
        assert "95 % interval" in await at.press("o")
        assert "last said" not in at.text
        assert "temperature" in await at.press("G")
        await at.press("o", "enter")
        assert "question 1" in at.text
        assert "from 0.5" in " ".join((await at.press("i")).split())
        assert max(map(len, at.text.splitlines())) <= width


async def test_an_empty_folder_says_how_to_begin(browse, run_path):
    for name in ("metadata.json", "results.jsonl"):
        (run_path / name).unlink()
    async with browse() as at:
        assert "mettle eval run ENV -m MODEL" in at.text
        await at.press("enter", "j", "slash", "escape")
        assert not at.app._exit


@pytest.mark.nightly
async def test_the_mouse_opens_what_it_points_at_twice(browse, run_path):
    async with browse(run_path) as at:
        await at.pilot.click("#main", offset=(10, 3))
        await at.settle()
        assert at.app.screen.index() == 2
        await at.pilot.click("#main", offset=(10, 3))
        await at.settle()
        assert "rollout 2" in at.text.splitlines()[0]
