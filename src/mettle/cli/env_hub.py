"""`mettle env push|pull|versions|diff|inspect|fork|star|yank|delete`; `list`, `info` and `install` from a Hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from mettle.cli.account import hub_client
from mettle.cli.terminal import json_option, print_json, print_next, print_table
from mettle.clients.hub import HubClient
from mettle.clients.hub_requests import own_path
from mettle.errors import UserError

CARD_WORDS = {
    "PENDING": "waiting", "RUNNING": "running", "SUCCESS": "passed", "FAILED": "failed", "CANCELLED": "not checked",
}  # fmt: skip
"""The states of a release's check, for people."""


def hub_name(text: str) -> tuple[str, str, str]:
    """(owner, name, version) of OWNER/NAME[@VERSION]. Raises: UserError when it is none."""
    rest, _, version = text.partition("@")
    owner, _, name = rest.partition("/")
    if not owner or not name or "/" in name:
        raise UserError(f"{text!r} is no environment of a Hub; write it like owner/name or owner/name@0.1.0")
    return owner, name, version or "latest"


def is_hub_name(text: str) -> bool:
    """True for OWNER/NAME[@VERSION] that is no folder here."""
    return text.count("/") == 1 and not text.startswith((".", "/", "~")) and not Path(text.partition("@")[0]).exists()


def _path(owner: str, name: str) -> str:
    return f"/environmentshub/{owner}/{name}"


@click.command()
@click.argument("source", metavar="PATH|NAME", default=".")
@click.option(
    "--visibility", type=click.Choice(["public", "private"]), help="Who sees it. [default: stays; new: private]"
)
@click.option("--team", help="Team that owns it. [default: the one of `mettle switch`, or oneself]")
@click.option("--auto-bump", is_flag=True, help="Raise the last number of the version in pyproject.toml first.")
@json_option
def push(source: str, visibility: str | None, team: str | None, auto_bump: bool, is_json: bool) -> None:
    """Publish an environment. Builds its wheel, and sends that and its source to the Hub.

    \b
    mettle env push my-task
    mettle env push environments/my_task --team robots --visibility public
    """
    from mettle.envs.packages.archive import bump_version, pack
    from mettle.envs.packages.install import package_folder
    from mettle.envs.packages.upload import push_package

    folder = package_folder(source)
    if folder is None:
        raise UserError(f"no environment package in {source}, nor of that name under ./environments")
    with hub_client() as client:
        client.get("/user/whoami")  # found out before anything is built
        if auto_bump:
            bump_version(folder)
        with tempfile.TemporaryDirectory(prefix="mettle-push-") as scratch:
            if not is_json:
                click.echo(f"building {folder.name}")
            packed = pack(folder, Path(scratch))
            owner = client.context.team if team is None else team
            pushed = client.carry_out(push_package(packed, owner=owner, visibility=visibility))
        address = client.context.url
    if is_json:
        print_json(pushed)
        return
    click.echo(f"pushed {pushed['slug']}@{packed.version} to {address}/environments/{pushed['slug']}")
    print_next(f"mettle env install {pushed['slug']}")


@click.command()
@click.argument("name", metavar="OWNER/NAME[@VERSION]")
@click.option("--target", type=click.Path(path_type=Path), help="Folder to make. [default: environments/NAME]")
def pull(name: str, target: Path | None) -> None:
    """Get the source of an environment."""
    from mettle.envs.packages.archive import unpack

    owner, project, version = hub_name(name)
    folder = target or Path("environments") / project.replace("-", "_")
    if folder.exists():
        raise UserError(f"{folder} is there already; name another folder with --target")
    with hub_client(needs_token=False) as client, tempfile.TemporaryDirectory(prefix="mettle-pull-") as scratch:
        found = client.get(f"{_path(owner, project)}/@{version}")["data"]
        archive = Path(scratch) / "source.tar.gz"
        client.download(own_path(found["package_url"]), archive)
        unpack(archive, folder, sha256=found["source_sha256"])
    click.echo(f"pulled {owner}/{project}@{found['semantic_version']} into {folder}")
    print_next(f"mettle env test {project}")


@click.command()
@click.argument("name", metavar="OWNER/NAME")
@json_option
def versions(name: str, is_json: bool) -> None:
    """List the versions of an environment on the Hub."""
    owner, project, _ = hub_name(name)
    with hub_client(needs_token=False) as client:
        found = client.get(f"{_path(owner, project)}/versions")["data"]["versions"]
    if is_json:
        print_json(found)
    else:
        rows = [
            (v["version"], v["created_at"], v["sha256"][:12], v["published_by"], "yanked" if v["is_yanked"] else "")
            for v in found
        ]
        print_table(("version", "pushed", "content", "by", ""), rows)


@click.command("diff")
@click.argument("name", metavar="OWNER/NAME[@VERSION]")
@click.argument("other", metavar="[VERSION]", default="")
@click.option("--stat", "is_stat", is_flag=True, help="The files alone, without their lines.")
@json_option
def difference(name: str, other: str, is_stat: bool, is_json: bool) -> None:
    """Show what differs between two versions on the Hub. With one version, or none: what it, or the newest, changed.

    \b
    mettle env diff ann/my-task@0.1.0 0.2.0
    mettle env diff ann/my-task --stat
    """
    owner, project, version = hub_name(name)
    before, after = (version, other) if other else ("", version)
    with hub_client(needs_token=False) as client:
        found = client.get(f"{_path(owner, project)}/difference", before=before or None, after=after)["data"]
    if is_json:
        print_json(found)
        return
    said = f"{owner}/{project} {found['before']} to {found['after']}"
    if not found["files"]:
        click.echo(f"{said}: nothing differs")
        return
    rows = [
        (each["path"], each["kind"], f"+{each['num_added']} -{each['num_removed']}", each["note"])
        for each in found["files"]
    ]
    print_table(("file", "", "lines", ""), rows, title=said)
    if found["num_hidden"]:
        click.echo(f"{found['num_hidden']} more files differ")
    for each in found["files"] if not is_stat else []:
        if each["hunks"]:
            click.echo("\n".join(_unified(each)))


def _unified(file: dict[str, Any]) -> list[str]:
    lines = ["", f"--- {file['path']}", f"+++ {file['path']}"]
    for hunk in file["hunks"]:
        lines += [hunk["head"], *(f"{edit}{text}" for edit, _, _, text in hunk["lines"])]
    return lines


@click.command()
@click.argument("name", metavar="OWNER/NAME[@VERSION]")
@click.argument("path", default="")
@json_option
def inspect(name: str, path: str, is_json: bool) -> None:
    """Look at a file or a folder of an environment on the Hub."""
    owner, project, version = hub_name(name)
    with hub_client(needs_token=False) as client:
        found = client.ask("GET", f"{_path(owner, project)}/@{version}/inspect", params={"path": path})["data"]
    if is_json:
        print_json(found)
    elif found["kind"] == "file":
        click.echo(found["content"], nl=not found["content"].endswith("\n"))
    else:
        print_table(("file", "bytes"), [(e["path"] + "/" * e["is_directory"], e["size"]) for e in found["entries"]])


@click.command()
@click.argument("name", metavar="OWNER/NAME")
@click.option("--team", help="Team to fork for. [default: the one of `mettle switch`, or oneself]")
def fork(name: str, team: str | None) -> None:
    """Copy an environment on the Hub, to change it."""
    owner, project, _ = hub_name(name)
    with hub_client() as client:
        acting = client.context.team if team is None else team
        made = client.post(f"{_path(owner, project)}/fork", {"team_slug": acting} if acting else {})["data"]
    click.echo(f"{made['message']} as {made['slug']}")
    print_next(f"mettle env pull {made['slug']}")


@click.command()
@click.argument("name", metavar="OWNER/NAME")
@click.option("--remove", is_flag=True, help="Take the star back.")
def star(name: str, remove: bool) -> None:
    """Star an environment on the Hub."""
    owner, project, _ = hub_name(name)
    with hub_client() as client:
        client.ask("DELETE" if remove else "PUT", f"{_path(owner, project)}/star")
    click.echo(f"{'took the star of' if remove else 'starred'} {owner}/{project}")


@click.command()
@click.argument("name", metavar="OWNER/NAME@VERSION")
@click.option("--reason", default="", help="Shown to who installs it all the same.")
@click.option("--undo", is_flag=True, help="Take the yank back.")
def yank(name: str, reason: str, undo: bool) -> None:
    """Yank a version on the Hub. pip then takes it only where it is named exactly."""
    owner, project, version = hub_name(name)
    if "@" not in name:
        raise UserError(f"name the version, as in {name}@0.1.0")
    with hub_client() as client:
        client.post(f"{_path(owner, project)}/@{version}/yank", {"reason": None if undo else reason})
    click.echo(f"{'took back the yank of' if undo else 'yanked'} {owner}/{project}@{version}")


@click.command()
@click.argument("name", metavar="OWNER/NAME[@VERSION]")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def delete(name: str, yes: bool) -> None:
    """Delete an environment on the Hub, or one version of it, for good."""
    owner, project, version = hub_name(name)
    said = f"{owner}/{project}" + (f"@{version}" if "@" in name else " with all of its versions")
    if not yes:
        click.confirm(f"delete {said} for good?", abort=True)
    with hub_client() as client:
        client.delete(_path(owner, project) + (f"/@{version}" if "@" in name else ""))
    click.echo(f"deleted {said}")


def card_word(state: str) -> str:
    """The state of a release's check in a word; empty where there was none."""
    return CARD_WORDS.get(state, state.lower())


def list_hub(words: str, *, is_mine: bool, is_json: bool) -> None:
    """The environments of the Hub in use."""
    with hub_client(needs_token=False) as client:
        found = client.get(
            "/environmentshub/", search=words or None, mine_only=is_mine or None, limit=200, sort_by="relevance"
        )
        address = client.context.url
    if is_json:
        print_json(found["data"])
        return
    if not found["data"]:
        click.echo(f"no environment at {address}" + (f" has the words {words!r}" if words else ""))
        return
    rows = [
        (
            f"{e['owner']['name']}/{e['name']}",
            e["latest_version"],
            e["visibility"].lower(),
            e["stars"],
            e["description"],
        )
        for e in found["data"]
    ]
    print_table(("environment", "version", "", "stars", "description"), rows)
    print_next(f"mettle env install {rows[0][0]}")


def info_hub(name: str, *, is_json: bool) -> None:
    """One environment of the Hub in use."""
    owner, project, version = hub_name(name)
    with hub_client(needs_token=False) as client:
        found = client.get(f"{_path(owner, project)}/@{version}")["data"]
    if is_json:
        print_json(found)
        return
    yanked = found["yanked_reason"] or ("yes" if found["is_yanked"] else "")
    shown = {
        "environment": f"{owner}/{project}", "version": found["semantic_version"], "description": found["description"],
        "visibility": found["visibility"].lower(), "tags": ", ".join(found["tags"]), "stars": found["stars"],
        "content": found["content_hash"][:12], "yanked": yanked, "quality card": card_word(found["card_state"]),
        "needs": ", ".join(map(str, found["metadata"].get("dependencies") or [])),
    }  # fmt: skip
    print_table(("", ""), [(key, value) for key, value in shown.items() if value not in (None, "")])
    print_next(f"mettle env install {owner}/{project}")


def install_hub(name: str) -> None:
    """Install an environment of the Hub in use: its wheel by hash, and what it needs."""
    from mettle.envs.packages.install import install_wheels

    owner, project, version = hub_name(name)
    with hub_client(needs_token=False) as client, tempfile.TemporaryDirectory(prefix="mettle-install-") as scratch:
        wheels = _wheels(client, Path(scratch), owner, project, version)
        install_wheels(wheels)
        shown = wheels[0].name.split("-")[1]
    click.echo(f"installed {owner}/{project}@{shown}")
    print_next(f"mettle env info {project}")


def _wheels(client: HubClient, folder: Path, owner: str, name: str, version: str) -> list[Path]:
    """The wheel, and those of what it needs of the same owner: such a name is never looked for on another index."""
    from mettle.envs.packages.install import needed_names
    from mettle.storage.files import sha256_file

    wheels: list[Path] = []
    wanted = [(name, version)]
    seen: set[str] = set()
    while wanted:
        project, at = wanted.pop(0)
        seen.add(project)
        found = client.get(f"{_path(owner, project)}/@{at}")["data"]
        target = folder / str(found["wheel_url"]).rpartition("/")[2]
        client.download(own_path(found["wheel_url"]), target)
        if sha256_file(target) != found["sha256"]:
            raise UserError(f"the wheel of {owner}/{project} that came is not the one that the Hub names; try again")
        wheels.append(target)
        owned = {str(e["name"]) for e in client.get("/environmentshub/", owner=owner, limit=200)["data"]}
        wanted += [(needed, "latest") for needed in needed_names(target) if needed in owned - seen]
    return wheels
