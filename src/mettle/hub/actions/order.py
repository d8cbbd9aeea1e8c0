"""What a check is given: the files of a release, the wheels of this Hub that it needs, and what else it asks for.

A name that this Hub has is taken from this Hub, as its index does; one that is private here, and not its owner's, is
never looked for elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from email.parser import Parser
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from mettle.envs.packages.install import NOT_NEEDED, requirement_name
from mettle.hub.accounts.people import Person
from mettle.hub.caller import Caller
from mettle.hub.lab import Lab
from mettle.hub.registry import catalogue, releases
from mettle.hub.registry.catalogue import HubEnvironment
from mettle.hub.registry.releases import Release
from mettle.web.problems import HttpError


@dataclass(frozen=True, slots=True)
class CheckOrder:
    """One release to check. `wheels` are (path, file name), the release's own first."""

    slug: str
    name: str
    version: str
    source: str
    source_sha256: str
    wheels: list[tuple[str, str]]
    requirements: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    index: str = ""
    reach: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As its file has it."""
        return asdict(self)


def order_of(c: Connection, lab: Lab, environment: HubEnvironment, release: Release) -> CheckOrder:
    """What to check, found before anything runs."""
    order = CheckOrder(
        environment.slug, environment.name, release.version, str(lab.blobs.path(release.source_sha256)),
        release.source_sha256, [], index=lab.upstream_index, reach=list(lab.check_reach),
    )  # fmt: skip
    seen = {environment.name}
    waiting = [release]
    while waiting:
        one = waiting.pop(0)
        order.wheels.append((str(lab.blobs.path(one.wheel_sha256)), one.wheel_name))
        headers = Parser().parsestr(one.wheel_metadata, headersonly=True)
        for needed in headers.get_all("Requires-Dist") or []:
            name = requirement_name(needed)
            if "extra ==" in needed or name in NOT_NEEDED or name in seen:
                continue
            seen.add(name)
            own, is_refused = _here(c, environment, name)
            if own is not None:
                waiting.append(own)
            elif is_refused:
                order.refused.append(name)
            else:
                order.requirements.append(str(needed))
    return order


def _here(c: Connection, environment: HubEnvironment, name: str) -> tuple[Release | None, bool]:
    """The newest release of that name that this environment may see; and whether the name is somebody's private one."""
    oldest = catalogue.oldest_named(c, name)
    if oldest is None:
        return None, False
    asking = Caller(Person(environment.owner_id, environment.owner, environment.owner, "", False, False, 0.0))
    for owner in dict.fromkeys((environment.owner, oldest[0])):
        try:
            return releases.find_release(c, catalogue.find_environment(c, asking, owner, name), "latest"), False
        except HttpError:
            continue
    return None, True


def read_order(path: Path) -> CheckOrder:
    """An order from its file."""
    values = json.loads(path.read_text(encoding="utf-8"))
    return CheckOrder(**{**values, "wheels": [(str(path), str(name)) for path, name in values["wheels"]]})
