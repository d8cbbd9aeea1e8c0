"""`rl invite`, `rl work`, `rl workers`: what they refuse and what they show."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from mettle.cli.rl import rl
from mettle.config.loader import load_config
from mettle.errors import ProviderError, UserError
from mettle.inference.outside import worker
from mettle.inference.outside.roster import Roster, invite
from mettle.runs.config import RunConfig
from mettle.runs.create import write_configs
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir


def run(*arguments: object) -> object:
    return CliRunner(env={"METTLE_WORK_TOKEN": ""}).invoke(
        rl, [str(one) for one in arguments], catch_exceptions=False, standalone_mode=False
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("http://127.0.0.1:9",), "--token or METTLE_WORK_TOKEN"),
        (("127.0.0.1:9", "--token", "t"), "is no address of a run"),
        (("http://127.0.0.1:9", "--token", "t", "--relay", "here"), "is no address with a port"),
    ],
)
def test_what_names_no_run_is_refused_in_a_line(arguments: tuple[str, ...], why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why):
        run("work", *arguments, "--dir", tmp_path)


def test_a_run_that_nobody_answers_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "GIVE_UP", 1)
    with pytest.raises(ProviderError, match="no run lets workers in at"):
        run("work", "http://127.0.0.1:9", "--token", "t", "--dir", tmp_path)


def made_run(folder: Path, more: str) -> RunDir:
    """A run's directory, as it is made from a config."""
    folder.mkdir(exist_ok=True)
    config = folder / "run.toml"
    config.write_text('[[orchestrator.envs]]\nid = "reverse-text"\n' + more)
    run_dir = RunDir(folder)
    write_configs(run_dir, load_config(RunConfig, [config]))
    Ledger(run_dir.ledger).close()
    return run_dir


def test_a_run_without_a_door_says_so_and_names_no_command_that_would_refuse(tmp_path: Path) -> None:
    made_run(tmp_path / "shut", "")
    shown = run("workers", tmp_path / "shut").output  # type: ignore[attr-defined]
    assert shown == "run shut has no door for workers from outside: it was made without [inference.outside]\n"


def test_the_workers_of_a_run_are_listed(tmp_path: Path) -> None:
    run_dir = made_run(tmp_path, "[inference.outside]\n")
    assert "nobody has worked" in run("workers", tmp_path).output  # type: ignore[attr-defined]
    roster = Roster(run_dir.outside)
    found = roster.invitation(invite(run_dir.outside, "ann"))
    assert found is not None
    roster.join("k1", found).sampled = 12
    roster.save()
    shown = run("workers", tmp_path).output  # type: ignore[attr-defined]
    assert "ann" in shown
    assert "12" in shown
