"""Who asks: a person with a session or a token, or nobody."""

from __future__ import annotations

from dataclasses import dataclass, field

from mettle.hub.accounts.people import Person
from mettle.hub.accounts.teams import ADMIN, Team
from mettle.web.problems import HttpError


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. `person` is None for somebody who is not signed in; a session has every scope."""

    person: Person | None = None
    teams: tuple[Team, ...] = ()
    scopes: frozenset[str] = frozenset()
    csrf: str = ""
    is_session: bool = False
    address: str = ""
    token_id: str = ""
    roles: dict[str, str] = field(default_factory=dict)

    @property
    def is_admin(self) -> bool:
        return self.person is not None and self.person.is_admin

    @property
    def name(self) -> str:
        """For the audit log."""
        return "nobody" if self.person is None else self.person.slug

    @property
    def owner_ids(self) -> list[str]:
        """Whose things are theirs: the person's own and those of the teams."""
        return [] if self.person is None else [self.person.id, *(team.id for team in self.teams)]

    def may(self, scope: str) -> bool:
        """Whether the session or the token covers an area; reading is part of writing."""
        return scope in self.scopes or scope.replace(":read", ":write") in self.scopes

    def is_member(self, owner_id: str) -> bool:
        """Whether a person or team is the caller, or one of theirs."""
        return owner_id in self.owner_ids

    def governs(self, owner_id: str) -> bool:
        """Whether they decide for an owner: themselves, a team that they are an admin of, or anything for an admin."""
        if self.person is None:
            return False
        return self.is_admin or owner_id == self.person.id or self.roles.get(owner_id) == ADMIN


def owner_of(caller: Caller, team_id: str | None) -> str:
    """Whose a new thing is. Raises: HttpError 403 for a team that is not the caller's."""
    assert caller.person is not None, "the routes are for people who are signed in"
    if not team_id:
        return caller.person.id
    team = next((t for t in caller.teams if t.id == team_id), None)
    if team is None:
        raise HttpError(403, f"you are in no team {team_id[:60]!r}")
    return team.id
