"""Sending a packed environment to a Hub: the six requests of a push, each of which may be asked again."""

from __future__ import annotations

from typing import Any

from mettle.clients.hub import HubClient, refusal
from mettle.envs.packages.archive import Packed
from mettle.storage.files import sha256_file

UPLOAD_S = 300.0


def push_package(
    client: HubClient, packed: Packed, *, owner: str = "", visibility: str | None = None
) -> dict[str, Any]:
    """Publish one version; returns its slug, ids and hashes. Raises: UserError for what the Hub refuses."""
    asked: dict[str, Any] = {"name": packed.name}
    if visibility is not None:
        asked["visibility"] = visibility.upper()
    if owner:
        asked["owner_slug"] = owner
    environment = client.post("/environmentshub/resolve", asked)["data"]
    base = f"/environmentshub/{environment['id']}"
    project = packed.project
    tags = project.get("tags") or project.get("keywords") or []
    metadata = {
        "description": str(project.get("description") or ""), "tags": tags,
        "license": str(project.get("license") or ""), "dependencies": project.get("dependencies") or [],
        "python_requires": str(project.get("requires-python") or ""),
    }  # fmt: skip
    for kind, path, key in (("wheels", packed.wheel, "wheel_id"), ("versions", packed.source, "version_id")):
        body = {
            "content_hash": packed.content_hash, "filename": path.name, "sha256": sha256_file(path),
            "size": path.stat().st_size, "semantic_version": packed.version, "metadata": metadata,
        }  # fmt: skip
        told = client.post(f"{base}/{kind}", body)["data"]
        # The address is the secret of an upload: no token goes there.
        answer = client.http.put(
            told["upload_url"], content=path.read_bytes(), headers={"Authorization": ""}, timeout=UPLOAD_S
        )
        if not answer.is_success:
            raise refusal(answer)
        client.post(f"{base}/{kind}/{told[key]}/finalize")
    slug = f"{environment['owner']['name']}/{environment.get('name') or packed.name}"
    return {
        "slug": slug, "version": packed.version, "environment_id": environment["id"], "created": environment["created"],
        "content_hash": packed.content_hash, "wheel_sha256": sha256_file(packed.wheel),
    }  # fmt: skip
