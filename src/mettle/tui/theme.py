"""The colours: one theme for dark terminals, one for light ones, and which of them to begin with."""

from __future__ import annotations

from collections.abc import Mapping

from textual.theme import Theme

DARK = Theme(
    name="mettle-dark",
    dark=True,
    primary="#7aa2f7",
    secondary="#bb9af7",
    accent="#6fd0d6",
    success="#9ece6a",
    warning="#e0af68",
    error="#f7768e",
    foreground="#d5dae8",
    background="#12151c",
    surface="#181c25",
    panel="#222836",
    variables={
        "muted": "#7f89a3",
        "footer-key-foreground": "#7aa2f7",
        "footer-background": "#181c25",
        "input-selection-background": "#7aa2f7 35%",
    },
)
LIGHT = Theme(
    name="mettle-light",
    dark=False,
    primary="#2456c5",
    secondary="#7b3fb5",
    accent="#0b7285",
    success="#2b7a34",
    warning="#8a5a00",
    error="#c0233c",
    foreground="#24292f",
    background="#fcfcfb",
    surface="#f3f4f2",
    panel="#e6e8e4",
    variables={"muted": "#6a737d", "footer-key-foreground": "#2456c5", "footer-background": "#f3f4f2"},
)


def first_theme(environment: Mapping[str, str]) -> str:
    """The theme that suits the terminal's background, where the terminal says it (`COLORFGBG`), else the dark one."""
    background = environment.get("COLORFGBG", "").rpartition(";")[2]
    return LIGHT.name if background in ("7", "15") else DARK.name
