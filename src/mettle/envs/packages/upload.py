"""Sending a packed environment to a Hub: the six requests of a push, each of which may be asked again."""

from __future__ import annotations

from typing import Any

from mettle.clients.hub_requests import ApiRequest, Steps
from mettle.envs.packages.archive import Packed
from mettle.storage.files import sha256_file

UPLOAD_S = 300.0


def push_package(packed: Packed, *, owner: str = "", visibility: str | None = None) -> Steps[dict[str, Any]]:
    """Publish one version, by `carry_out` of either client; gives its slug, ids and hashes."""
    asked: dict[str, Any] = {"name": packed.name}
    if visibility is not None:
        asked["visibility"] = visibility.upper()
    if owner:
        asked["owner_slug"] = owner
    environment = (yield ApiRequest("POST", "/environmentshub/resolve", json=asked))["data"]
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
        told = (yield ApiRequest("POST", f"{base}/{kind}", json=body))["data"]
        yield ApiRequest("PUT", told["upload_url"], content=path.read_bytes(), is_public=True, timeout_s=UPLOAD_S)
        yield ApiRequest("POST", f"{base}/{kind}/{told[key]}/finalize")
    slug = f"{environment['owner']['name']}/{environment.get('name') or packed.name}"
    return {
        "slug": slug, "version": packed.version, "environment_id": environment["id"], "created": environment["created"],
        "content_hash": packed.content_hash, "wheel_sha256": sha256_file(packed.wheel),
    }  # fmt: skip
