"""What pip and uv read: the simple index (PEP 503, 691, 700, 714, 592, 658), the files behind it, and uploads.

`/owners/OWNER/simple/` has one owner's environments; `/simple/` has all, where a name is that of the oldest environment
called so, and of no other. A name that anybody here has, seen or not, is never looked for anywhere else: only names
that nobody has are sent on to `upstream_index`, where one is set.
"""

from __future__ import annotations

import hashlib
import html
from typing import Annotated, Any, Final
from urllib.parse import quote

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, RedirectResponse
from sqlalchemy import Connection
from starlette.responses import Response

from mettle.hub.access import EnvironmentReader, LabHere, lab_of
from mettle.hub.caller import Caller
from mettle.hub.registry import catalogue, releases
from mettle.hub.registry.archives import normalized_name
from mettle.hub.registry.catalogue import HubEnvironment
from mettle.hub.registry.releases import Release
from mettle.web.bodies import body_chunks
from mettle.web.problems import HttpError, json_response

router = APIRouter(include_in_schema=False)

JSON_TYPE: Final = "application/vnd.pypi.simple.v1+json"
HTML_TYPE: Final = "text/html; charset=utf-8"


def index_reader(caller: EnvironmentReader) -> Caller:
    return caller


Reader = Annotated[Caller, Depends(index_reader)]


@router.get("/simple/")
def all_projects(request: Request, lab: LabHere, caller: Reader) -> Response:
    """The names that the caller can install."""
    with lab.database.read() as c:
        return _projects(request, catalogue.list_names(c, caller))


@router.get("/owners/{owner}/simple/")
def owners_projects(request: Request, lab: LabHere, caller: Reader, owner: str) -> Response:
    """The same of one owner."""
    with lab.database.read() as c:
        return _projects(request, catalogue.list_names(c, caller, owner))


@router.get("/simple/{project}/")
def project(request: Request, lab: LabHere, caller: Reader, project: str) -> Response:
    """The files of the oldest environment of a name."""
    name = normalized_name(project)
    with lab.database.read() as c:
        oldest = catalogue.oldest_named(c, name)
        if oldest is None:
            return _elsewhere(lab.upstream_index, name)
        return _files(request, c, catalogue.find_environment(c, caller, oldest[0], name))


@router.get("/owners/{owner}/simple/{project}/")
def owners_project(request: Request, lab: LabHere, caller: Reader, owner: str, project: str) -> Response:
    """The files of one owner's environment."""
    name = normalized_name(project)
    with lab.database.read() as c:
        if catalogue.oldest_named(c, name) is None:
            return _elsewhere(lab.upstream_index, name)
        return _files(request, c, catalogue.find_environment(c, caller, owner, name))


@router.get("/packages/{owner}/{name}/{version}/{filename}")
def package(lab: LabHere, caller: Reader, owner: str, name: str, version: str, filename: str) -> Response:
    """A wheel, its metadata, or the source archive."""
    with lab.database.read() as c:
        environment = catalogue.find_environment(c, caller, owner, name)
        release = releases.find_release(c, environment, version)
    if filename == f"{release.wheel_name}.metadata":
        return Response(release.wheel_metadata.encode(), media_type="application/octet-stream")
    if filename not in (release.wheel_name, "source.tar.gz", release.source_name):
        raise HttpError(404, f"{environment.slug}@{release.version} has no file {filename[:100]!r}")
    is_wheel = filename == release.wheel_name
    with lab.database.write() as c:
        catalogue.count_download(c, environment.id)
    path = lab.blobs.path(release.wheel_sha256 if is_wheel else release.source_sha256)
    return FileResponse(path, media_type="application/octet-stream", filename=filename)


@router.put("/api/v1/uploads/{secret}")
async def upload(request: Request, secret: str) -> dict[str, Any]:
    """The bytes of a file that was announced. The address is the secret; there is no other."""
    lab = lab_of(request)

    def target() -> tuple[str, int]:
        with lab.database.read() as c:
            return releases.upload_target(c, secret)

    sha256, max_bytes = await run_in_threadpool(target)
    with lab.blobs.incoming() as (writer, path):
        async for chunk in body_chunks(request, max_bytes=max_bytes):
            await run_in_threadpool(writer.write, chunk)
        await run_in_threadpool(lab.blobs.keep, writer, path, sha256)
    return {"success": True}


def _elsewhere(upstream: str, name: str) -> Response:
    if not upstream:
        raise HttpError(404, f"no package {name[:100]!r} here, and this Hub asks no other index")
    return RedirectResponse(f"{upstream.rstrip('/')}/{name}/", status_code=302)


def _projects(request: Request, names: list[str]) -> Response:
    if _wants_json(request):
        body = {"meta": {"api-version": "1.1"}, "projects": [{"name": name} for name in names]}
        return json_response(body, headers={"content-type": JSON_TYPE})
    return _page("".join(f'<a href="{name}/">{name}</a><br>\n' for name in names))


def _files(request: Request, c: Connection, environment: HubEnvironment) -> Response:
    found = releases.releases_of(c, environment.id)
    files = [_file(environment, release) for release in found]
    if _wants_json(request):
        body = {
            "meta": {"api-version": "1.1"}, "name": environment.name, "files": files,
            "versions": sorted({release.version for release in found}),
        }  # fmt: skip
        return json_response(body, headers={"content-type": JSON_TYPE})
    return _page("".join(map(_link, files)))


def _file(environment: HubEnvironment, release: Release) -> dict[str, Any]:
    path = f"/packages/{environment.owner}/{environment.name}/{release.version}/{quote(release.wheel_name)}"
    metadata = {"sha256": hashlib.sha256(release.wheel_metadata.encode()).hexdigest()}
    python = next(
        (
            line.partition(": ")[2]
            for line in release.wheel_metadata.splitlines()
            if line.startswith("Requires-Python: ")
        ),
        None,
    )
    shown = {
        "filename": release.wheel_name, "url": path, "hashes": {"sha256": release.wheel_sha256},
        "size": release.wheel_bytes, "yanked": (release.yanked_reason or True) if release.is_yanked else False,
        "core-metadata": metadata, "data-dist-info-metadata": metadata,
    }  # fmt: skip
    return {**shown, "requires-python": python} if python else shown


def _link(file: dict[str, Any]) -> str:
    metadata = f"sha256={file['core-metadata']['sha256']}"
    more = {"data-core-metadata": metadata, "data-dist-info-metadata": metadata}
    if file.get("requires-python"):
        more["data-requires-python"] = file["requires-python"]
    if file["yanked"]:
        more["data-yanked"] = "" if file["yanked"] is True else file["yanked"]
    said = "".join(f' {name}="{html.escape(value)}"' for name, value in more.items())
    href = f"{file['url']}#sha256={file['hashes']['sha256']}"
    return f'<a href="{html.escape(href)}"{said}>{html.escape(file["filename"])}</a><br>\n'


def _page(links: str) -> Response:
    head = '<!DOCTYPE html><html><head><meta name="pypi:repository-version" content="1.1"></head><body>'
    return Response(f"{head}\n{links}</body></html>", media_type=HTML_TYPE)


def _wants_json(request: Request) -> bool:
    """As pip and uv ask: both name JSON first. A browser names HTML."""
    accepted = request.headers.get("accept", "")
    return JSON_TYPE in accepted or "application/vnd.pypi.simple.latest+json" in accepted
