"""What a run tells of its workers from outside, and which configs let them in."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from mettle.config.loader import load_config
from mettle.errors import UserError
from mettle.inference.outside.checks import WorkFault
from mettle.inference.outside.roster import Roster, invite
from mettle.runs.config import RunConfig
from mettle.runs.create import write_configs
from mettle.runs.outside import OutsideWatch, invite_worker
from mettle.storage.run_dir import RunDir

ENV = {"orchestrator": {"envs": [{"id": "reverse-text"}]}}


def test_who_comes_goes_and_is_banned_is_told_once(tmp_path: Path) -> None:
    watch, roster = OutsideWatch(tmp_path), Roster(tmp_path)
    found = roster.invitation(invite(tmp_path, "ann"))
    assert found is not None
    assert watch.look() == []
    ann = roster.join("k" * 64, found)
    roster.save()
    assert [(news.kind, news.text) for news in watch.look()] == [
        ("worker_joined", "worker ann (kkkkkkkk) samples from outside")
    ]
    ann.sampled = 3
    roster.changed()
    roster.save()
    assert watch.look() == []
    roster.leave(ann)
    roster.save()
    assert [news.text for news in watch.look()] == ["worker ann (kkkkkkkk) has gone after 3 completions"]
    roster.join("k" * 64, found)
    roster.ban(ann, WorkFault("tokens", "2 of 9"))
    (news,) = watch.look()
    assert (news.kind, news.text) == ("worker_banned", "worker ann (kkkkkkkk) is banned: tokens: 2 of 9")
    assert OutsideWatch(tmp_path).look() == []  # a supervisor that was started again says nothing twice


def test_a_list_that_cannot_be_read_is_no_news(tmp_path: Path) -> None:
    watch = OutsideWatch(tmp_path)
    (tmp_path / "roster.json").write_text("[")
    assert watch.look() == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"inference": {"outside": {"max_lag": 3}}}, "max_lag 3 is more than orchestrator.max_staleness 2"),
        ({"inference": {"outside": {"folder": "x"}}}, "folder is the run's own"),
        ({"inference": {"outside": {}}, "deployment": {"share": "s"}}, "they would have nothing to do; leave it out"),
        ({"inference": {"outside": {}, "record_experts": True}}, "nobody checks what workers say of experts"),
        ({"inference": {"outside": {"check_share": 0.0}}}, "greater than 0"),
    ],
)
def test_what_could_not_be_checked_is_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        RunConfig.model_validate({**ENV, **changes})


def test_on_a_cluster_the_door_is_the_owners_and_no_replica_has_one(tmp_path: Path) -> None:
    toml = '[[orchestrator.envs]]\nid = "reverse-text"\n[inference.outside]\n[deployment]\nengine = "ray"\n'
    (tmp_path / "run.toml").write_text(toml)
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    write_configs(run_dir, load_config(RunConfig, [tmp_path / "run.toml"]))
    written = {name: json.loads(run_dir.config(name).read_text()) for name in ("inference", "replica")}
    assert written["replica"]["outside"] is None
    assert (written["inference"]["engine"], written["inference"]["outside"]["folder"]) == (
        "remote", str(run_dir.outside),
    )  # fmt: skip


def test_a_run_has_a_folder_for_its_workers_and_one_without_a_door_invites_nobody(tmp_path: Path) -> None:
    toml = '[[orchestrator.envs]]\nid = "reverse-text"\n'
    for name, more in (("open", "[inference.outside]\n"), ("shut", "")):
        (tmp_path / "run.toml").write_text(toml + more)
        run_dir = RunDir(tmp_path / name)
        run_dir.path.mkdir()
        write_configs(run_dir, load_config(RunConfig, [tmp_path / "run.toml"]))
    invitation = invite_worker(RunDir(tmp_path / "open"), "ann")
    assert (invitation.name, invitation.url) == ("ann", None)
    with pytest.raises(UserError, match=r"was made without \[inference.outside\]"):
        invite_worker(RunDir(tmp_path / "shut"), "ann")
