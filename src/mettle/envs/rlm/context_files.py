"""A rollout's context as files: what the row gives, staged on this host and sent into the sandbox.

Parts: `ContextFiles`. Rewards of published environments read the folder that the model has worked in, at
`state["rlm_fs_root"]`; so there is a folder on this host, which has what was given and, when the rollout has ended,
what the model has left. Invariants: no link leads out of what is taken over; what is larger than the limit is refused.
"""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mettle.envs.errors import EnvironmentFault

if TYPE_CHECKING:
    from mettle.envs.proxy.machines import AgentMachine

FOLDER = "rlm_fs"
MAX_BYTES = 1_000_000_000


@dataclass(frozen=True)
class ContextFiles:
    """The folder of one rollout. `named` tells the model what it has."""

    rollout_dir: Path
    root: Path
    named: str
    metadata: Mapping[str, Any]

    @classmethod
    def stage(cls, info: Mapping[str, Any], context_key: str, dir_key: str, max_bytes: int | None) -> ContextFiles:
        """Write what `info` gives: a folder under `dir_key`, or text or JSON under `context_key`.

        Raises: EnvironmentFault for a folder that is none, that links out of itself, or that is too large.
        """
        rollout_dir = Path(tempfile.mkdtemp(prefix="mettle_rlm_"))
        root = rollout_dir / FOLDER
        root.mkdir()
        try:
            named = _write(root, info, context_key, dir_key)
            sizes = [path.stat().st_size for path in root.rglob("*") if path.is_file()]
            limit = MAX_BYTES if max_bytes is None else max_bytes
            if sum(sizes) > limit:
                raise EnvironmentFault(f"the context has {sum(sizes)} bytes; filesystem_copy_max_bytes allows {limit}")
        except BaseException:
            shutil.rmtree(rollout_dir, ignore_errors=True)
            raise
        return cls(rollout_dir, root, named, {"file_count": len(sizes), "total_size": sum(sizes)})

    @property
    def has_data(self) -> bool:
        """Whether there is anything in it."""
        return any(self.root.iterdir())

    async def take_over(self, machine: AgentMachine, folder: str) -> None:
        """Replace what is here by what a folder of the sandbox holds. Raises: OSError when that cannot be read."""
        archive = f"/tmp/.{FOLDER}.tar"
        await machine.exec(["tar", "-C", folder, "-cf", archive, "."], timeout_s=60)
        data = await machine.download(archive, max_bytes=MAX_BYTES)
        await asyncio.to_thread(self._unpack, data)

    def _unpack(self, data: bytes) -> None:
        shutil.rmtree(self.root)
        self.root.mkdir()
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            files = [member for member in archive if member.isfile() or member.isdir()]
            archive.extractall(self.root, members=files, filter="data")

    def remove(self) -> None:
        """Delete it from this host."""
        shutil.rmtree(self.rollout_dir, ignore_errors=True)


def _write(root: Path, info: Mapping[str, Any], context_key: str, dir_key: str) -> str:
    given_folder, context = info.get(dir_key), info.get(context_key)
    if given_folder:
        source = Path(str(given_folder))
        if not source.is_dir():
            raise EnvironmentFault(f"the context folder {source} of this row is no folder")
        outside = [path for path in source.rglob("*") if path.is_symlink()]
        if outside:
            raise EnvironmentFault(f"the context folder {source} links to {outside[0].name}, which is not taken over")
        shutil.copytree(source, root, dirs_exist_ok=True)
        return "the files of the working directory"
    if context is None:
        return ""
    name = "context.txt" if isinstance(context, str) else "context.json"
    text = context if isinstance(context, str) else json.dumps(context, ensure_ascii=False, default=str)
    (root / name).write_text(text, encoding="utf-8", errors="replace")
    return f"`{name}` in the working directory ({len(text)} characters)"
