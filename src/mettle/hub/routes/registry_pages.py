"""The pages of environments: the list, and one with its README, versions, files and settings."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.responses import Response

from mettle.hub.access import Anybody, LabHere, SignedIn
from mettle.hub.accounts import audit
from mettle.hub.pages import page, query_of
from mettle.hub.registry import catalogue, releases
from mettle.hub.registry.archives import list_files, read_member
from mettle.hub.registry.catalogue import Order, Wanted
from mettle.hub.registry.differences import difference_of
from mettle.hub.registry.readme import render_readme
from mettle.hub.routes.actions_api import retry_check
from mettle.hub.routes.addresses import root_of
from mettle.hub.routes.forms import CheckedForm
from mettle.hub.routes.looking import looking
from mettle.hub.routes.secrets_api import change_secret
from mettle.hub.secrets import store
from mettle.web.problems import HttpError

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, dependencies=[Depends(looking)])

PAGE_SIZE = 30
MAX_SHOWN_BYTES = 200_000


@router.get("/environments")
def environments_page(
    lab: LabHere, caller: Anybody, words: Annotated[str, Query(max_length=200)] = "", owner: str = "",
    tag: str = "", show: Literal["", "mine", "starred"] = "", sort: Order = "relevance",
    number: Annotated[int, Query(alias="page", ge=1, le=100_000)] = 1,
) -> HTMLResponse:  # fmt: skip
    """The list."""
    wanted = Wanted(
        words, owner, "", [tag] if tag else (), show == "mine", show == "starred", sort, sort != "name", PAGE_SIZE,
        (number - 1) * PAGE_SIZE,
    )  # fmt: skip
    with lab.database.read() as c:
        found, total = catalogue.list_environments(c, caller, wanted)
    kept = [("words", words), ("owner", owner), ("tag", tag), ("show", show), ("sort", sort)]
    return page(
        "environments.html", found=found, total=total, words=words, owner=owner, tag=tag, show=show, sort=sort,
        number=number, num_pages=max(1, -(-total // PAGE_SIZE)), query=query_of([(k, v) for k, v in kept if v]),
    )  # fmt: skip


@router.get("/environments/{owner}/{name}")
def environment_page(
    request: Request, lab: LabHere, caller: Anybody, owner: str, name: str, version: str = "latest",
    tab: Literal["readme", "card", "versions", "files", "settings"] = "readme", path: str = "",
) -> HTMLResponse:  # fmt: skip
    """One environment."""
    with lab.database.read() as c:
        environment = catalogue.find_environment(c, caller, owner, name)
        known = releases.releases_of(c, environment.id)
        release = releases.find_release(c, environment, version) if known else None
        is_starred = catalogue.has_star(c, caller, environment)
        kept = store.list_secrets(c, environment.owner_id, environment.id) if tab == "settings" else []
        kept = kept if caller.is_member(environment.owner_id) else []
    shown: dict[str, object] = {"secrets": kept, "target": f"/environments/{environment.slug}"}
    shown |= {"readme": render_readme(release.readme) if release and tab == "readme" else ""}
    if release and tab == "files":
        source = lab.blobs.path(release.source_sha256)
        shown["files"] = list_files(source)
        member = read_member(source, path, MAX_SHOWN_BYTES) if path else None
        if path and member is None:
            raise HttpError(404, f"{environment.slug}@{release.version} has no file {path[:200]!r}")
        shown["content"] = None if member is None else member[0].decode("utf-8", "replace")
        shown["is_cut"] = member is not None and member[1] > MAX_SHOWN_BYTES
    return page(
        "environment.html", environment=environment, release=release, releases=known, tab=tab, path=path,
        root=root_of(request),
        is_starred=is_starred,
        may_push=caller.is_member(environment.owner_id),
        may_govern=caller.governs(environment.owner_id), may_star=caller.is_session, **shown,
    )  # fmt: skip


@router.get("/environments/{owner}/{name}/difference")
def difference_page(
    lab: LabHere, caller: Anybody, owner: str, name: str, before: str = "", after: str = "latest"
) -> HTMLResponse:
    """What differs between two versions; without `before`, from the one that `after` followed."""
    with lab.database.read() as c:
        environment = catalogue.find_environment(c, caller, owner, name)
        old, new = releases.find_pair(c, environment, before, after)
        known = releases.releases_of(c, environment.id)
    found = difference_of(lab.blobs.path(old.source_sha256), lab.blobs.path(new.source_sha256))
    return page("difference.html", environment=environment, releases=known, old=old, new=new, found=found)


@router.post("/environments/{owner}/{name}")
def change_environment(lab: LabHere, caller: SignedIn, owner: str, name: str, fields: CheckedForm) -> Response:
    """What the buttons of its page do."""
    action = fields.get("action", "")
    target = f"/environments/{quote(owner)}/{quote(name)}"
    with lab.database.write() as c:
        environment = catalogue.find_environment(c, caller, owner, name)
        if action in ("star", "unstar"):
            catalogue.set_star(c, caller, environment, action == "star")
            return RedirectResponse(target, status_code=303)
        if action == "check":
            release = retry_check(c, caller, environment, fields.get("version", ""))
            return RedirectResponse(f"{target}?tab=card&version={quote(release.version)}", status_code=303)
        if action in ("secret", "unsecret"):
            catalogue.must_push(caller, environment)
            change_secret(c, lab, caller, environment.owner_id, environment.id, fields)
            return RedirectResponse(f"{target}?tab=settings", status_code=303)
        catalogue.must_govern(caller, environment)
        said = environment.slug
        if action == "visibility":
            catalogue.set_visibility(c, environment, fields.get("visibility", ""))
        elif action in ("yank", "unyank"):
            release = releases.find_release(c, environment, fields.get("version", ""))
            releases.set_yanked(c, release, fields.get("reason", "") if action == "yank" else None)
            said = f"{said}@{release.version}"
        elif action == "delete" and fields.get("name") == environment.slug:
            catalogue.delete_environment(c, environment)
            target = "/environments"
        else:
            raise HttpError(400, f"to delete it, type its name: {environment.slug}")
        audit.note(c, caller.name, f"environment.{action}", said, address=caller.address)
    return RedirectResponse(target, status_code=303)


@router.get("/dashboard/environments/{owner}/{name}")
def old_address(owner: str, name: str) -> Response:
    """Where the field's clients send people."""
    return RedirectResponse(f"/environments/{quote(owner)}/{quote(name)}", status_code=307)
