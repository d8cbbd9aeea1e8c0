"""Whatever a file holds, the terminal stays whole and the browser goes on."""

from __future__ import annotations

import json
import re

import pytest

HOSTILE = (
    "\x1b[2J\x1b[31mred\x1b]0;title\x07\x1b]52;c;aGk=\x07 \x9b31m [bold]not bold[/bold] [@click=app.quit]x[/] "
    "\u202eright to left\u2066 se\u200bcret \ud83d half z" + "\u0301" * 300 + " \u65e5\u672c\u8a9e \U0001f468\u200d\U0001f469\u200d\U0001f467 \r\n\x00\x07\x08"
)  # fmt: skip
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ud800-\udfff]")


@pytest.fixture
def hostile(write, make_row):
    """An evaluation in which every text is an attack."""
    row = make_row(0, None)
    row.update(
        example_id=HOSTILE, answer=HOSTILE, info={HOSTILE: [HOSTILE]}, stop_condition=HOSTILE, extra=HOSTILE,
        error={"error": HOSTILE, "message": HOSTILE, "kind": HOSTILE, "error_chain_str": HOSTILE},
        prompt=[{"role": HOSTILE, "content": HOSTILE}, {"role": "user", "content": [{"type": HOSTILE}, HOSTILE]}],
        completion=[
            {"role": "assistant", "content": HOSTILE, "reasoning_content": HOSTILE, "tool_calls": [HOSTILE, 7, None]},
            {"role": "tool", "tool_call_id": HOSTILE, "name": HOSTILE, "content": HOSTILE},
            {"role": "assistant", "content": HOSTILE, "tool_calls": {"not": "a list"}},
        ],
    )  # fmt: skip
    scored = make_row(1, 1.0, metrics={HOSTILE: 1.0, "[red]": 0.5}, tool_defs=[HOSTILE, {"name": HOSTILE}])
    about = {"env_id": HOSTILE, "model": HOSTILE, "name": HOSTILE, "sampling_args": {HOSTILE: HOSTILE}}
    return write([row, scored], "hostile1", **about)


@pytest.mark.nightly
async def test_no_screen_shows_a_character_that_drives_the_terminal(browse, hostile):
    keys = (
        "end",
        "home",
        "s",
        "s",
        "s",
        "o",
        "o",
        "question_mark",
        "escape",
        "enter",
        "end",
        "z",
        "m",
        "r",
        "end",
        "r",
        "w",
    )
    keys += ("w", "i", "i", "y", "c", "Y", "right", "t", "down", "escape", "escape", "t", "escape", "escape")
    async with browse(hostile, (130, 50)) as at:
        for key in (*keys, "home", "enter", "enter", "x", "slash", "escape"):
            shown = await at.press(key)
            assert not CONTROLS.search(shown), (key, CONTROLS.search(shown))
        assert len(at.sent) == 3
        assert at.sent[0].encode(), "what is copied can be sent"


async def test_markup_of_a_model_stays_text(browse, hostile):
    async with browse(hostile, (240, 50), rollout=0) as at:
        assert "[bold]not bold[/bold] [@click=app.quit]x[/]" in at.text
        assert "\N{SYMBOL FOR ESCAPE}[2J" in at.text


@pytest.mark.nightly
async def test_a_text_of_ten_megabytes_is_shown_in_part_and_opened_further(browse, write, make_row):
    text = "".join(f"word{i % 7} " for i in range(1_700_000))
    path = write([make_row(0, 1.0, completion=[{"role": "assistant", "content": text}])], "huge")
    async with browse(path, rollout=0) as at:
        transcript = at.app.screen.transcript
        assert len(transcript.blocks[-1].body) == 1_000_000
        assert f"{len(text) - 1_000_000:,} more characters" in await at.press("end")
        await at.press("plus", "end")
        assert len(transcript.blocks[-1].body) == 10_000_000
        assert "more characters" in at.text
        await at.press("slash")
        assert "places" in await at.type("word6")
        await at.press("r", "w", "end")


async def test_one_line_of_a_million_wide_characters_is_wrapped(browse, write, make_row):
    path = write([make_row(0, 1.0, completion=[{"role": "assistant", "content": "\u65e5\u672c" * 250_000}])], "wide")
    async with browse(path, rollout=0) as at:
        assert "\u65e5\u672c\u65e5" in await at.press("end")


async def test_a_damaged_file_shows_what_can_be_read_and_says_what_cannot(browse, run_path):
    lines = (run_path / "results.jsonl").read_bytes().splitlines(keepends=True)
    odd = json.dumps(
        {"example_id": {"a": [1]}, "prompt": 7, "completion": {"x": 1}, "reward": "high", "metrics": [1], "timing": 3}
    )
    broken = b"\x00\xff garbage\n[]\n" + odd.encode() + b"\n" + b"[" * 100_000 + b"\n"
    (run_path / "results.jsonl").write_bytes(lines[0] + broken + lines[1] + lines[2][:50])
    async with browse(run_path) as at:
        assert "1 of 3 | 3 lines could not be read" in at.text
        await at.press("down", "enter")
        assert "rollout 1" in at.text.splitlines()[0]
        assert '"reward": "high"' in await at.press("r")


async def test_an_evaluation_without_readable_metadata_is_listed_with_the_reason(browse, run_path):
    (run_path / "metadata.json").write_text("{")
    async with browse() as at:
        await at.press("enter", "enter")
        words = " ".join(at.text.replace("\N{LEFT ONE EIGHTH BLOCK}", " ").split())
        assert "metadata.json cannot be read: Expecting" in words, "the folder's name may wrap"
        await at.press("enter")
        assert at.text.splitlines()[0].endswith("?"), "it is not opened"


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    "odd",
    [
        *({"a": {"b": []}}, 1e400),
        *(pytest.param(odd, marks=NIGHTLY) for odd in (7, [1, [2]], "x", -1, True)),
    ],
)
async def test_metadata_of_any_kind_are_listed_and_opened_or_refused(browse, write, make_row, odd):
    names = (
        "avg_reward",
        "avg_error",
        "num_examples",
        "time",
        "time_ms",
        "pass_threshold",
        "sampling_args",
        "env_args",
        "stats",
    )
    names += ("cost", "version_info", "pass_at_k", "avg_metrics", "base_url", "name")
    for name in ("odd1", "odd2"):
        write([make_row(1, 1.0), make_row(1, None)], name, **dict.fromkeys(names, odd))
    async with browse(size=(140, 40)) as at:
        assert "odd1" in await at.press("enter", "enter")
        await at.press("x", "down", "x", "c", "escape", "enter", "enter")
        assert at.app.fault is None


async def test_a_mistake_of_ours_prints_no_texts_of_models(browse, run_path, capsys):
    async def fail() -> None:
        async with browse(run_path) as at:
            at.app.call_later(lambda: 1 / 0)
            await at.settle()

    with pytest.raises(ZeroDivisionError):
        await fail()
    shown = capsys.readouterr()
    assert "locals" not in shown.out + shown.err


async def test_a_rollout_that_is_not_there_is_refused(browse, run_path):
    async with browse(run_path, rollout=99) as at:
        assert "run00001 has 4 rollouts, no number 99" in at.text


async def test_a_file_that_goes_away_is_said(browse, run_path):
    async with browse(run_path) as at:
        (run_path / "results.jsonl").unlink()
        await at.press("enter")
        assert "mettle" in at.text
        at.app.screen_stack[-2].read_on()
        await at.settle()
        assert "cannot read" in at.text
