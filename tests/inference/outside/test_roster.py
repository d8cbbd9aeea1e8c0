"""Who may come in, and that a ban outlives the server."""

from pathlib import Path

import pytest

from mettle.inference.outside.checks import WorkFault
from mettle.inference.outside.roster import JoinRefused, Roster, invite, read_roster


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_invitation_is_for_the_first_key_that_comes_with_it(tmp_path: Path) -> None:
    roster = Roster(tmp_path)
    found = roster.invitation(invite(tmp_path, "ann"))
    assert found is not None
    assert roster.join("k1", found).name == "ann"
    roster.join("k1", found)
    with pytest.raises(JoinRefused, match="has another key"):
        roster.join("k2", found)


def test_a_token_that_nobody_gave_away_is_none(tmp_path: Path) -> None:
    invite(tmp_path, "ann")
    for token in ("", "other", "../roster"):
        assert Roster(tmp_path).invitation(token) is None


def test_a_token_does_not_stand_in_the_folder(tmp_path: Path) -> None:
    token = invite(tmp_path, "ann")
    assert all(token not in path.read_text() and token not in path.name for path in tmp_path.rglob("*.json"))


def test_a_ban_is_of_the_key_and_of_the_invitation_also_after_a_restart(tmp_path: Path) -> None:
    roster = Roster(tmp_path)
    token, other = invite(tmp_path, "ann"), invite(tmp_path, "bob")
    found, bobs = roster.invitation(token), roster.invitation(other)
    assert found is not None
    assert bobs is not None
    roster.ban(roster.join("k1", found), WorkFault("tokens", "3 of 9"))
    for again in (roster, Roster(tmp_path)):
        with pytest.raises(JoinRefused, match="banned: tokens: 3 of 9"):
            again.invitation(token)
        with pytest.raises(JoinRefused, match="banned"):
            again.join("k1", bobs)
        with pytest.raises(JoinRefused, match="banned"):
            again.hear("k1", 5)


def test_a_word_counts_once(tmp_path: Path) -> None:
    roster = Roster(tmp_path)
    found = roster.invitation(invite(tmp_path, "ann"))
    assert found is not None
    with pytest.raises(JoinRefused, match="is to join"):
        roster.hear("k1", 1)
    roster.join("k1", found)
    roster.hear("k1", 1)
    for count in (1, 0):
        with pytest.raises(JoinRefused, match="was said before"):
            roster.hear("k1", count)


def test_who_is_silent_for_a_lease_is_known_by_the_clock(tmp_path: Path) -> None:
    clock = Clock()
    roster = Roster(tmp_path, clock=clock)
    found = roster.invitation(invite(tmp_path, "ann"))
    assert found is not None
    ann = roster.join("k1", found)
    clock.now = 29.0
    assert roster.silent(30.0) == []
    clock.now = 31.0
    assert roster.silent(30.0) == [ann]
    roster.leave(ann)
    roster.save()
    assert [worker.state for worker in read_roster(tmp_path)] == ["gone"]
