"""What a model says cannot leave its place on the screen."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from mettle.tui.markdown import markdown_lines
from mettle.tui.text import cut, pad, sendable, wrap
from mettle.wording import MAX_ACCENTS, one_line, printable

any_text = st.text(st.characters(codec=None), max_size=200)


def is_harmless(char: str) -> bool:
    return unicodedata.category(char) not in ("Cc", "Cs") and unicodedata.bidirectional(char) not in (
        "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI",
    )  # fmt: skip


@given(any_text)
def test_nothing_that_drives_a_terminal_is_left(text):
    shown = printable(text)
    assert all(char == "\n" or is_harmless(char) for char in shown)
    assert printable(shown) == shown


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("a\x1b[31mb", "a\N{SYMBOL FOR ESCAPE}[31mb"),
        ("a\tb\r\nc", "a    b\nc"),
        ("50\r100", "50\N{SYMBOL FOR CARRIAGE RETURN}100"),
        ("\ud83d\udc4d", "\N{REPLACEMENT CHARACTER}" * 2),
        ("abc\u202edef", "abc\N{REPLACEMENT CHARACTER}def"),
        ("se\u200bcret", "se\N{REPLACEMENT CHARACTER}cret"),
        ("\x9b31m", "\N{REPLACEMENT CHARACTER}31m"),
        ("z" + "\u0301" * 500, "z" + "\u0301" * MAX_ACCENTS),
    ],
)
def test_what_could_do_harm_is_shown_for_what_it_is(said, shown):
    assert printable(said) == shown


@given(any_text, st.integers(1, 40))
def test_a_cell_is_as_wide_as_it_was_told(text, width):
    assert cell_len(pad(one_line(text), width)) == width
    assert cell_len(cut(one_line(text), width)) <= width


@given(any_text, st.integers(2, 40))
def test_lines_fit_and_lose_nothing_but_the_spaces_they_break_at(text, width):
    shown = printable(text)
    lines = wrap(shown, width)
    assert all(cell_len(shown[start:end]) <= width for start, end in lines)
    assert "".join(shown[start:end] for start, end in lines).replace(" ", "") == shown.replace("\n", "").replace(
        " ", ""
    )


def test_words_are_kept_together_where_they_fit():
    text = "the quick brown\nfox \u65e5\u672c\u8a9e jumps"
    assert [text[start:end] for start, end in wrap(text, 9)] == [
        "the quick",
        "brown",
        "fox",
        "\u65e5\u672c\u8a9e",
        "jumps",
    ]
    assert [text[start:end] for start, end in wrap(text, None)] == text.split("\n")


@given(any_text)
def test_a_clipboard_takes_every_text(text):
    sendable(text).encode()


@given(any_text)
def test_markdown_lets_nothing_through_that_plain_text_would_not(text):
    for line in markdown_lines(printable(text), 40, is_dark=True) or []:
        for segment in line:
            assert all(is_harmless(char) for char in segment.text)
            assert segment.style is None or segment.style.link is None


def plain(text: str) -> str:
    return "\n".join("".join(s.text for s in line).rstrip() for line in markdown_lines(text, 60, is_dark=True) or [])


def test_markdown_keeps_what_parsers_of_answers_look_for():
    shown = plain("one\ntwo\n<think>so</think>\n\\boxed{3} \\[ x^2 \\] &#27;[31m\n\n[a](http://b.c)")
    for kept in ("one\ntwo\n<think>so</think>\n\\boxed{3}", "\\[ x^2 \\]", "&#27;[31m", "http://b.c"):
        assert kept in shown


def test_markdown_draws_tables_code_and_emphasis():
    shown = plain("# Title\n\n**bold**\n\n```python\nx = 1\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |")
    assert "x = 1" in shown
    assert "**" not in shown
    assert "|---|" not in shown
