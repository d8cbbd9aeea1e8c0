"""A failing quality card stops hosted work on its release, unless who submits it says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from mettle.envs.packages.registry import find_environment
from mettle.errors import UserError
from mettle.hub.accounts import audit
from mettle.hub.actions.states import FAILED
from mettle.hub.caller import Caller
from mettle.hub.registry import catalogue, releases
from mettle.web.problems import HttpError


def must_have_passed(c: Connection, caller: Caller, names: Sequence[str], *, is_overridden: bool) -> None:
    """Names as a submission has them: name or owner/name[@version]. An override is noted in the audit log.

    Raises: HttpError 409 for a release whose card has failed.
    """
    failed = [said for said in (_failed(c, caller, name) for name in names) if said]
    if failed and not is_overridden:
        raise HttpError(
            409, f"the quality card of {', '.join(failed)} has failed: look at it, or submit again with override_card"
            " (`--override-card`)", code="card_failed",
        )  # fmt: skip
    for said in failed:
        audit.note(c, caller.name, "environment.override", said, address=caller.address)


def _failed(c: Connection, caller: Caller, name: str) -> str:
    """owner/name@version of the release that is meant, when its card has failed; empty otherwise."""
    path, _, version = name.partition("@")
    owner, _, project = path.rpartition("/")
    try:
        if not owner:
            oldest = catalogue.oldest_named(c, project)
            owner = oldest[0] if oldest else ""
        # What runs is what is installed on this machine, whatever the newest release is.
        installed = find_environment(project).version
        environment = catalogue.find_environment(c, caller, owner, project)
        release = releases.find_release(c, environment, version or installed)
    except (HttpError, UserError):
        return ""
    return f"{environment.slug}@{release.version}" if release.card_state == FAILED else ""
