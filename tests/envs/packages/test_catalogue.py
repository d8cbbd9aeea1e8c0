"""The page about environments says what loading them and their cards say."""

from __future__ import annotations

from pathlib import Path

from mettle.envs.packages.catalogue import catalogue_markdown

FOLDER = Path(__file__).resolve().parents[3] / "environments"
CELLS = ("what", "turns", "tools", "sandbox", "extras", "reward", "shown", "refused", "quality")


def rows(page: str) -> dict[str, dict[str, str]]:
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| [")]
    return {name.partition("`")[2].partition("`")[0]: dict(zip(CELLS, cells, strict=True)) for name, *cells in lines}


def test_each_package_has_a_row_that_tells_turns_tools_sandbox_and_reward():
    found = rows(catalogue_markdown(FOLDER, "note", ".."))
    assert len(found) == len(list(FOLDER.glob("*/pyproject.toml")))
    assert (found["wordle"]["turns"], found["wordle"]["reward"]) == (
        "up to 6",
        "`solved` + 0.2 `speed` + 0.2 `letters`",
    )
    assert (found["shell-task"]["tools"], found["shell-task"]["sandbox"]) == ("`bash`", "a machine")
    assert (found["agent-task"]["tools"], found["code-judge"]["sandbox"]) == ("the agent's own", "judges code")
    assert (found["arithmetic"]["turns"], found["arithmetic"]["sandbox"]) == ("1", "-")
    assert found["reasoning-logic"]["extras"] == "reasoning_gym"


def test_what_was_earned_comes_from_the_card_and_is_left_open_without_one(tmp_path):
    package = tmp_path / "arithmetic"
    package.mkdir()
    (package / "pyproject.toml").write_text('[project]\nname = "arithmetic"\ndescription = "Sums."\n')
    (package / "README.md").write_text("Needs mettle-lab[math].\n")
    bare = rows(catalogue_markdown(tmp_path, "note", ".."))["arithmetic"]
    assert (bare["shown"], bare["refused"], bare["quality"], bare["extras"]) == ("-", "-", "-", "math")
    (package / "QUALITY.md").write_text("| gold | 8 | 0.75 | 0 | 1 | x |\n| refusal | 8 | 0.125 | 0 | 1 | x |\n")
    carded = rows(catalogue_markdown(tmp_path, "note", ".."))["arithmetic"]
    assert (carded["shown"], carded["refused"]) == ("0.75", "0.125")
