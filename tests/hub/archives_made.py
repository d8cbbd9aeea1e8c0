"""Wheels and source archives as pushes send them, good ones and hostile ones."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zipfile
from typing import Any

README = "# My task\n\nWhat it is.\n"


def wheel(
    name: str = "my-task", version: str = "0.1.0", *, files: dict[str, bytes] | None = None, extra: str = ""
) -> bytes:
    """A wheel of one module."""
    module = name.replace("-", "_")
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: >=3.11\n{extra}\n"
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for path, data in {
            f"{module}.py": b"def load_environment(): ...\n",
            f"{module}-{version}.dist-info/METADATA": metadata.encode(),
            f"{module}-{version}.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{module}-{version}.dist-info/RECORD": b"",
            **(files or {}),
        }.items():
            archive.writestr(zipfile.ZipInfo(path), data)
    return made.getvalue()


def source(name: str = "my-task", version: str = "0.1.0", *, files: dict[str, bytes] | None = None) -> bytes:
    """A source archive; `files` adds and replaces."""
    project = f'[project]\nname = "{name}"\nversion = "{version}"\ndescription = "A task."\ntags = ["text"]\n'
    entries = {
        "README.md": README.encode(),
        "pyproject.toml": project.encode(),
        "my_task.py": b"x = 1\n",
        **(files or {}),
    }
    return tar([(path, data) for path, data in entries.items()])


def tar(entries: list[tuple[str, bytes]], *, links: dict[str, str] | None = None) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for path, data in entries:
            info = tarfile.TarInfo(path)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for path, target in (links or {}).items():
            info = tarfile.TarInfo(path)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return gzip.compress(plain.getvalue(), mtime=0)


def push(
    client: Any, name: str = "my-task", version: str = "0.1.0", *, wheel_bytes: bytes | None = None,
    source_bytes: bytes | None = None, **resolve: str,
) -> Any:  # fmt: skip
    """The requests of a push; returns the answer that ended it: the first refusal, or the last."""
    answer = client.post("/api/v1/environmentshub/resolve", json={"name": name, **resolve})
    if answer.status_code != 200:
        return answer
    environment_id = answer.json()["data"]["id"]
    blobs = {
        "wheels": (
            wheel_bytes or wheel(name, version),
            f"{name.replace('-', '_')}-{version}-py3-none-any.whl",
            "wheel_id",
        ),
        "versions": (source_bytes or source(name, version), f"{name}-{version}.tar.gz", "version_id"),
    }
    content_hash = hashlib.sha256(blobs["versions"][0]).hexdigest()
    for kind, (data, filename, key) in blobs.items():
        body = {
            "content_hash": content_hash, "filename": filename, "sha256": hashlib.sha256(data).hexdigest(),
            "size": len(data), "semantic_version": version, "metadata": {"dependencies": []},
        }  # fmt: skip
        base = f"/api/v1/environmentshub/{environment_id}/{kind}"
        answer = client.post(base, json=body)
        if answer.status_code != 200:
            return answer
        told = answer.json()["data"]
        answer = client.put(told["upload_url"], content=data)
        if answer.status_code != 200:
            return answer
        answer = client.post(f"{base}/{told[key]}/finalize")
        if answer.status_code != 200:
            return answer
    return answer
